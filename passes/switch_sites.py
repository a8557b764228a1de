"""Analysis: where the gate of a branch is multiplied in.

x + conv(y)        ->  x + gate * conv(y)
x + bn(conv(y))    ->  x + bn(conv(y)), with bn's affine times gate: nothing to pay per pixel
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import fx

from tgfx.gated_layers import can_gate
from tgfx.ir.source import Source
from tgfx.ir.switches import Edge
from tgfx.ops.naming import op_name
from tgfx.passes.place import Placement, Site

# y(c * x) == c * y(x) for every c: unlike a channel's gate, a choice's may be a little below zero in training
_LINEAR = {
    "Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "dropout", "unsqueeze", "squeeze", "view", "reshape",
    "permute", "transpose", "flatten", "contiguous", "AvgPool2d", "avg_pool2d",
}  # fmt: skip


def place_switches(source: Source, edges: dict[Edge, int], placement: Placement) -> Placement:
    """`placement` with a site for every operand in `edges` (operand -> bank slot)."""
    by_name = {node.name: node for node in source.module.graph.nodes}
    of_value: dict[fx.Node, dict[Edge, int]] = {}
    for edge, slot in edges.items():
        value = by_name[edge.node].args[edge.position]
        of_value.setdefault(value, {})[edge] = slot  # type: ignore[arg-type]
    sites = list(placement.sites)
    for value, own in of_value.items():
        norm = _norm_behind(value, source, own)
        if norm is None:
            sites.extend(Site(e.node, "edge", None, np.array(slot), position=e.position) for e, slot in own.items())
        else:
            _gate_norm(sites, norm, next(iter(own.values())))
    return replace(placement, sites=tuple(sites))


def _norm_behind(value: fx.Node, source: Source, own: dict[Edge, int]) -> str | None:
    """The batch norm that makes this value, if nothing but these operands, all of one gate, ever sees it."""
    users = {edge.node for edge in own}
    if len(set(own.values())) > 1 or {user.name for user in value.users} != users or len(own) != len(users):
        return None
    node = value
    while True:
        if node.op == "call_module" and can_gate(source.module.get_submodule(str(node.target))):
            return node.name
        if op_name(node, source.module) not in _LINEAR or len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
        if len(node.users) != 1:
            return None


def _gate_norm(sites: list[Site], norm: str, slot: int) -> None:
    for index, site in enumerate(sites):
        if site.node == norm and site.kind == "batch_norm":  # its channels have gates too
            sites[index] = replace(site, times=np.array(slot))
            return
    sites.append(Site(norm, "batch_norm", None, np.array(slot)))
