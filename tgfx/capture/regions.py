"""Regions that torch.export wraps up in graphs of their own: written into the graph around them, with a mark.

wrap_with_set_grad_enabled(False, submod_1, x)   ->   the nodes of submod_1, marked as without gradients
wrap_with_autocast("cpu", None, False, ...)      ->   its nodes, marked as without autocast
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from tgfx.capture.autocast_off import OFF
from tgfx.capture.not_in_graph import NotInGraphError
from tgfx.capture.without_gradients import MARK

_OPERATORS = torch.ops.higher_order
_AUTOCAST_ON = "autocast is on"


class _Region(NamedTuple):
    """A call of such an operator: where the graph inside is, and what it is called with."""

    mark: str | None  # for the nodes inside; None: the graph around them says it already
    where: fx.Node
    inputs: tuple


def unwrap_regions(module: fx.GraphModule) -> None:
    """Rewrite the graph of `module` in place."""
    while True:
        node, region = next(((n, r) for n in module.graph.nodes if (r := _region(n)) is not None), (None, None))
        if node is None or region is None:
            return
        inner = getattr(module, str(region.where.target))
        if region.mark is _AUTOCAST_ON:
            raise NotInGraphError("runs in an autocast region of its own", _path(inner.graph))
        _bring_inner_regions(module, inner, str(region.where.target))
        _write_out(module.graph, node, inner.graph, region)
        if not region.where.users:
            module.graph.erase_node(region.where)


def _bring_inner_regions(module: fx.GraphModule, inner: fx.GraphModule, path: str) -> None:
    for name, part in inner.named_children():
        setattr(module, f"{path}_{name}", part)
        for reader in inner.graph.nodes:
            if reader.op == "get_attr" and reader.target == name:
                reader.target = f"{path}_{name}"


def _region(node: fx.Node) -> _Region | None:
    if node.op != "call_function":
        return None
    if node.target is _OPERATORS.wrap_with_set_grad_enabled:
        return _Region(None if node.args[0] else MARK, node.args[1], node.args[2:])  # type: ignore[arg-type]
    if node.target is _OPERATORS.wrap_with_autocast:
        return _Region(_AUTOCAST_ON if node.args[2] else OFF, node.args[4], node.args[5:])  # type: ignore[arg-type]
    return None


def _path(inner: fx.Graph) -> str:
    """The module whose forward a region is in, as far as torch.export has noted it."""
    stacks = [node.meta.get("nn_module_stack") for node in inner.nodes if node.op == "call_function"]
    return next((str(next(reversed(stack.values()))[0]) for stack in stacks if stack), "")


def _write_out(graph: fx.Graph, node: fx.Node, inner: fx.Graph, region: _Region) -> None:
    """Regions inside have the marks of those around them too, until they say otherwise themselves."""
    places = [n for n in inner.nodes if n.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(places, region.inputs, strict=True))
    marks = {mark: node.meta[mark] for mark in (MARK, OFF) if mark in node.meta}
    if region.mark is not None:
        marks[region.mark] = _path(inner)
    elif node.target is _OPERATORS.wrap_with_set_grad_enabled:
        marks.pop(MARK, None)
    with graph.inserting_before(node):
        results = graph.graph_copy(inner, copies)
    for old, new in copies.items():
        if old.op.startswith("call"):
            new.meta.update(marks)
    for user in list(node.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[user.args[1]], propagate_meta=False)  # type: ignore[index, call-overload]
        graph.erase_node(user)
    graph.erase_node(node)
