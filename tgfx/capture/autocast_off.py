"""Regions that torch.autocast(..., enabled=False) keeps in full precision, written into the graph.

    with torch.autocast("cpu", enabled=False):            off = _enter_autocast(x.device.type, None, False, None)
        y = conv(x.float())                       ->      y = conv(x.float())
                                                          _exit_autocast(off)

Only where it makes a difference: most such regions hold sums and roots of values that are in full precision already.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tgfx.capture.not_in_graph import NotInGraphError
from tgfx.ir.autocast_switch import switch_off
from tgfx.ir.fake_run import Tensors, run_on_example
from tgfx.ir.source import Source, tensors_in

OFF = "tgfx_autocast_off"  # on nodes that ran where autocast was switched off: the module that did it


def write_switches(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rewrite `module` (its nodes marked by the front end) in place; `args` and `kwargs`: the example."""
    marked = [node for node in module.graph.nodes if OFF in node.meta]
    if not marked:
        return
    device_of = _input(module, args, kwargs)
    differing = _differing(module, args, kwargs)
    for region in _regions(module.graph):
        touched = [node for node in region if node in differing]
        if not touched:
            continue
        if device_of is None:
            raise NotInGraphError("switches autocast off, with no input to say on which device", region[0].meta[OFF])
        switch_off(module.graph, device_of, touched[0], touched[-1])
    module.recompile()


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Marked calls without others in between."""
    calls = (node for node in graph.nodes if node.op.startswith("call"))
    for off, nodes in groupby(calls, lambda node: OFF in node.meta):
        if off:
            yield list(nodes)


def _input(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = Source(module, args, kwargs, "fx").flat_inputs()
    return next((p for p, value in zip(places, values, strict=True) if isinstance(value, torch.Tensor)), None)


def _differing(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[fx.Node]:
    """Marked nodes that compute in another precision if autocast is on; all of them if that cannot be told."""
    inputs = Source(module, args, kwargs, "fx").flat_inputs()
    try:
        return run_on_example(module, lambda tensors: _Precisions(module, tensors), inputs).differing
    except Exception:
        return {node for node in module.graph.nodes if OFF in node.meta}


class _Precisions(fx.Interpreter):
    """Runs the graph with autocast on, and marked nodes both ways."""

    def __init__(self, module: fx.GraphModule, tensors: Tensors) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.differing: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        with self.tensors.entered(), torch.no_grad():
            if OFF not in n.meta or not n.op.startswith("call"):
                with _autocast(True):
                    result = super().run_node(n)
                    return pytree.tree_map(self._own, result) if n.op in ("placeholder", "get_attr") else result
            with _autocast(True):
                other = super().run_node(n)
            with _autocast(False):
                result = super().run_node(n)
            if [t.dtype for t in tensors_in(other)] != [t.dtype for t in tensors_in(result)]:
                self.differing.add(n)
            return result

    def _own(self, value: Any) -> Any:
        return self.tensors.stand_in(value) if isinstance(value, torch.Tensor) else value


def _autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False)
