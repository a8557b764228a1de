"""Analysis: where the gates of a model stand in a smaller copy of it.

    conv2 reads bn1, 16 channels:  gate index [0 .. 15]        (before the cut)
    conv2 reads bn1, 11 channels:  gate index [0, 2, 3, ..]    (after: the same slots, for what is left)

A second analysis of the smaller graph could choose other groups (within or across the groups of a convolution,
heads or their channels) and would lose a group's last channel; the places found first stay right for any cut.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tgfx.errors import PassError
from tgfx.ir.facts import ChannelMap, Route, TensorIds
from tgfx.passes.couple import Coupling
from tgfx.passes.place import Placement, Site
from tgfx.passes.survivors import Survivors


def carry_gates(
    placement: Placement,
    channels: ChannelMap,
    coupling: Coupling,
    survivors: Survivors,
    node_of: dict[str, str],
    reader_of: dict[str, str],
) -> Placement:
    """`node_of`: node of the source -> the node of the smaller graph that has its value. Slots keep their numbers.

    `reader_of`: likewise the node that has its operands, where that is another one.
    """
    sites = []
    for site in placement.sites:
        if site.node not in node_of:
            continue  # went with a dead branch
        index = site.index
        if index.ndim:  # one number is the gate of a whole branch
            for axis, positions in enumerate(survivors.kept(_carrier(site, channels))):
                if positions is not None and index.shape[axis] > 1:
                    index = index.take(positions, axis=axis)
        if site.kind != "batch_norm" and (index == coupling.slots).all():
            continue  # nothing but channels that stay
        operand = site.operand
        if operand is not None and operand.kind == "node":
            operand = replace(operand, name=node_of[operand.name], route=_carried(operand.route, node_of))
        index = np.ascontiguousarray(index) if index.ndim else index
        node = reader_of.get(site.node, node_of[site.node])
        sites.append(replace(site, node=node, operand=operand, index=index))
    return Placement(tuple(sites), placement.folded)


def _carried(route: Route | None, node_of: dict[str, str]) -> Route | None:
    if route is None:
        return None
    gone = [name for name in (route.node, *route.moves) if name not in node_of]
    if gone:
        raise PassError(
            "the way of a gate to channels that share an axis with samples or positions is cut off",
            pass_name="carry",
            expected="all data movement on it in the smaller model",
            found=f"none for {', '.join(gone)}",
            fix="train on without compact_; tgfx.shrink works",
        )
    return replace(route, node=node_of[route.node], moves=tuple(node_of[name] for name in route.moves))


def _carrier(site: Site, channels: ChannelMap) -> TensorIds:
    """The tensor whose channels the index names."""
    operand = site.operand
    if operand is None:  # a batch norm: its own value
        ids = channels.nodes[site.node].single
    elif operand.kind == "param":
        ids = channels.params[operand.name] if operand.name in channels.params else channels.buffers[operand.name]
    elif operand.route is not None:
        ids = channels.nodes[operand.route.node].single
    else:
        ids = channels.nodes[operand.name].tensors[operand.index]
    if ids is None:
        raise AssertionError(f"{site.node}: a gate over something without channels")
    return ids
