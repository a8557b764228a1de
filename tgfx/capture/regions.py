"""Regions that torch.export wraps up in graphs of their own: written into the graph around them, with a mark.

wrap_with_set_grad_enabled(False, submod_1, x)   ->   the nodes of submod_1, marked as without gradients
wrap_with_autocast("cpu", None, False, ...)      ->   its nodes: autocast is off outside as well
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tgfx.capture.not_in_graph import NotInGraphError
from tgfx.capture.without_gradients import MARK

_OPERATORS = torch.ops.higher_order


def unwrap_regions(module: fx.GraphModule) -> None:
    """Rewrite the graph of `module` in place."""
    while True:
        node = next((n for n in module.graph.nodes if _region(n) is not None), None)
        if node is None:
            return
        gradients, where, inputs = _region(node)  # type: ignore[misc]
        inner = getattr(module, str(where.target))
        if gradients is None:
            raise NotInGraphError("runs in an autocast region of its own", _path(inner.graph))
        _bring_inner_regions(module, inner, str(where.target))
        _write_out(module.graph, node, inner.graph, inputs, gradients)
        if not where.users:
            module.graph.erase_node(where)


def _bring_inner_regions(module: fx.GraphModule, inner: fx.GraphModule, path: str) -> None:
    for name, part in inner.named_children():
        setattr(module, f"{path}_{name}", part)
        for reader in inner.graph.nodes:
            if reader.op == "get_attr" and reader.target == name:
                reader.target = f"{path}_{name}"


def _region(node: fx.Node) -> tuple[bool | None, fx.Node, tuple] | None:
    """Whether gradients are on inside (None: autocast is), where the inner graph is, and what it is called with."""
    if node.op != "call_function":
        return None
    if node.target is _OPERATORS.wrap_with_set_grad_enabled:
        return bool(node.args[0]), node.args[1], node.args[2:]  # type: ignore[return-value]
    if node.target is _OPERATORS.wrap_with_autocast:
        return None if node.args[2] else True, node.args[4], node.args[5:]  # type: ignore[return-value]
    return None


def _path(inner: fx.Graph) -> str:
    """The module whose forward a region is in, as far as torch.export has noted it."""
    stacks = [node.meta.get("nn_module_stack") for node in inner.nodes if node.op == "call_function"]
    return next((str(next(reversed(stack.values()))[0]) for stack in stacks if stack), "")


def _write_out(graph: fx.Graph, node: fx.Node, inner: fx.Graph, inputs: tuple, gradients: bool) -> None:
    places = [n for n in inner.nodes if n.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(places, inputs, strict=True))
    path = _path(inner)
    with graph.inserting_before(node):
        results = graph.graph_copy(inner, copies)
    for old, new in copies.items():
        if not gradients and old.op.startswith("call") and _region(new) is None:
            new.meta[MARK] = path
    for user in list(node.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[user.args[1]], propagate_meta=False)  # type: ignore[index, call-overload]
        graph.erase_node(user)
    graph.erase_node(node)
