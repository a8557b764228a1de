"""Analysis: where the gates are multiplied in.

A dead channel must count for nothing wherever channels are summed up (a *read*). Each read is served once:

    conv(x, W)  ->  conv(x, W * gate)          the reader's own weight (right derivative, no cost per pixel)
    bn -> relu -> conv   ->   bn's affine * gate   (where every read of the group comes straight from batch norms)
    q @ k       ->  (q * gate) @ k             where neither side is a parameter
    layer_norm  ->  masked layer_norm(gate)

Gating the reader needs no zero to survive on the way, so sigmoid, softplus or a shift in between do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tgfx.ir.facts import ChannelMap, Operand, Read
from tgfx.ir.source import Source
from tgfx.passes.couple import Coupling
from tgfx.passes.fold import Folding


@dataclass(frozen=True)
class Site:
    """One multiplication: `index` (the shape of the operand's layer, or where its route starts) picks gate values."""

    node: str
    kind: str  # "param", "node", "masked", "batch_norm", "edge"
    operand: Operand | None
    index: np.ndarray
    position: int | None = None  # "edge": which argument of the node
    times: np.ndarray | None = None  # "batch_norm": a second gate over the whole of it


@dataclass(frozen=True)
class Placement:
    sites: tuple[Site, ...]
    folded: frozenset[str] = field(default_factory=frozenset)  # groups served by batch norms


def place_gates(source: Source, channels: ChannelMap, coupling: Coupling) -> Placement:
    folding = Folding(source, channels, coupling)
    reads_of = _reads_by_group(channels, coupling, folding.group_of_slot)
    folded: dict[int, set[str]] = {}
    for index in range(len(coupling.groups)):
        norms = folding.norms(index, reads_of.get(index, []))
        if norms:
            folded[index] = norms
    done = np.zeros(coupling.slots + 1, dtype=bool)
    for index in folded:
        group = coupling.groups[index]
        done[group.start : group.start + group.size] = True
    sites = [s for read in channels.reads if (s := _serve(read, coupling, done)) is not None]
    sites += _norm_sites(source, channels, coupling, folded)
    return Placement(_once(sites), frozenset(coupling.groups[i].name for i in folded))


def _once(sites: list[Site]) -> tuple[Site, ...]:
    """The same operand of the same node is gated once, however many sums it enters there."""
    seen: dict[tuple, Site] = {}
    for site in sites:
        operand = (site.operand.kind, site.operand.name, site.operand.index) if site.operand else ()
        seen.setdefault((site.node, site.kind, operand, site.index.shape, site.index.tobytes()), site)
    return tuple(seen.values())


def _reads_by_group(channels: ChannelMap, coupling: Coupling, group_of_slot: np.ndarray) -> dict[int, list[Read]]:
    found: dict[int, list[Read]] = {}
    for read in channels.reads:
        for index in np.unique(group_of_slot[coupling.slots_of(read.layer.numpy())]).tolist():
            if index >= 0:
                found.setdefault(index, []).append(read)
    return found


def _serve(read: Read, coupling: Coupling, done: np.ndarray) -> Site | None:
    if read.kind == "masked":
        operand = read.options[0]
        index = coupling.slots_of(operand.start.numpy())
        return None if (index == coupling.slots).all() else Site(read.node, "masked", operand, index)
    operand = next((o for o in read.options if o.kind == "param"), read.options[0])
    index = coupling.slots_of(operand.start.numpy())
    wanted = np.zeros(coupling.slots + 1, dtype=bool)
    wanted[coupling.slots_of(read.layer.numpy())] = True
    index = np.where(done[index] | ~wanted[index], coupling.slots, index)
    return None if (index == coupling.slots).all() else Site(read.node, operand.kind, operand, index)


def _norm_sites(source: Source, channels: ChannelMap, coupling: Coupling, folded: dict[int, set[str]]) -> list[Site]:
    by_norm: dict[str, list[int]] = {}
    for index, norms in folded.items():
        for name in norms:
            by_norm.setdefault(name, []).append(index)
    sites = []
    for name, indices in by_norm.items():
        known = channels.nodes[name].single
        layers = known.on_axis(1) if known else ()
        if not layers:
            continue
        slots = coupling.slots_of(layers[0].numpy())
        mine = np.zeros_like(slots, dtype=bool)
        for index in indices:
            group = coupling.groups[index]
            mine |= (slots >= group.start) & (slots < group.start + group.size)
        sites.append(Site(name, "batch_norm", None, np.where(mine, slots, coupling.slots)))
    return sites
