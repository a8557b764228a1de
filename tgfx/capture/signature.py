"""An exported graph with the signature of one that fx traced: the two modes of one model are called the same way.

evaluated   forward(self, x, mask=None)        by fx: a placeholder for each argument
exported    x, = flatten(([x], {}), in_spec)   a placeholder for each tensor
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.utils import _pytree as pytree


class OtherSignatureError(Exception):
    """The arguments or the result have a form that only torch.export knows to take apart."""


def take_signature(
    exported: fx.GraphModule, evaluated: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """In place."""
    graph = exported.graph
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen) or codegen.pytree_info.out_spec != pytree.tree_structure(None):
        raise OtherSignatureError("the result is put together by a note beside the graph")
    own = [node for node in evaluated.nodes if node.op == "placeholder"]
    if any(str(node.target).startswith("*") for node in own):
        raise OtherSignatureError("any number of arguments")
    leaves = [node for node in graph.nodes if node.op == "placeholder"]
    paths: list[tuple[Any, ...]] = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    if len(paths) != len(leaves):
        raise OtherSignatureError(f"{len(paths)} values for {len(leaves)} inputs")
    first = next(iter(graph.nodes))
    used = set()
    with graph.inserting_before(first):
        given = {str(node.target): _placeholder(graph, node) for node in own}
        for leaf, path in zip(leaves, paths, strict=True):
            name = str(own[path[1].idx].target) if path[0].idx == 0 else path[1].key
            used.add(name)
            leaf.replace_all_uses_with(_part(graph, given[name], path[2:]), propagate_meta=True)
        for node in own:
            if str(node.target) not in used:
                _check_as(graph, node, given[str(node.target)])
    for node in leaves:
        graph.erase_node(node)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    output.args = (output.args[0][0],)  # type: ignore[index]
    graph.set_codegen(CodeGen())
    exported.recompile()


def _placeholder(graph: fx.Graph, like: fx.Node) -> fx.Node:
    node = graph.create_node("placeholder", str(like.target), like.args, {}, f"given_{like.target}")
    node.meta = dict(like.meta)
    return node


def _part(graph: fx.Graph, value: fx.Node, path: tuple[Any, ...]) -> fx.Node:
    for key in path:
        if not isinstance(key, pytree.SequenceKey | pytree.MappingKey):
            raise OtherSignatureError(f"an argument with {key}")
        value = graph.call_function(
            operator.getitem, (value, key.idx if isinstance(key, pytree.SequenceKey) else key.key)
        )
    return value


def _check_as(graph: fx.Graph, node: fx.Node, given: fx.Node) -> None:
    """An argument that the example left out is fixed, and checked in every call (see GateTracer)."""
    for check in node.users:
        for assertion in check.users if check.target is operator.eq else ():
            if assertion.target is torch._assert:
                same = graph.call_function(operator.eq, (given, check.args[1]))
                graph.call_function(torch._assert, (same, assertion.args[1]))
