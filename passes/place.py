"""Analysis: where the gates are multiplied in.

A dead channel must count for nothing wherever channels are summed up (a *read*). Each read is served once:

    conv(x, W)  ->  conv(x, W * gate)          the reader's own weight (right derivative, no cost per pixel)
    bn -> relu -> conv   ->   bn's affine * gate   (where every read of the group comes straight from batch norms)
    q @ k       ->  (q * gate) @ k             where neither side is a parameter
    layer_norm  ->  masked layer_norm(gate)

Gating the reader needs no zero to survive on the way, so sigmoid, softplus or a shift in between do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from tgfx.gated_layers import can_gate
from tgfx.ir.facts import ChannelMap, Operand, Read
from tgfx.ir.source import Source
from tgfx.ops.naming import op_name
from tgfx.passes.couple import Coupling

# y(c * x) == c * y(x) for c >= 0, element by element or window by window
HOMOGENEOUS = {
    "relu", "ReLU", "leaky_relu", "LeakyReLU", "PReLU", "max_pool2d", "MaxPool2d", "avg_pool2d", "AvgPool2d",
    "MaxPool1d", "MaxPool3d", "AvgPool1d", "AvgPool3d", "adaptive_avg_pool2d", "AdaptiveAvgPool2d",
    "AdaptiveAvgPool1d", "Dropout", "AdaptiveAvgPool3d", "dropout", "Identity", "flatten", "Flatten", "view",
    "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", "cat", "add", "iadd", "interpolate",
    "Upsample", "getitem", "chunk", "split", "mean", "Dropout2d", "adaptive_max_pool2d", "AdaptiveMaxPool2d", "clone",
    "detach", "channel_shuffle", "ChannelShuffle", "unflatten", "Unflatten", "movedim",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One multiplication: `index` (the shape of the operand's layer) picks gate values from the bank."""

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
    graph = {node.name: node for node in source.module.graph.nodes}
    group_of_slot = _group_of_slot(coupling)
    reads_of = _reads_by_group(channels, coupling, group_of_slot)
    carried = _groups_of_nodes(channels, group_of_slot, coupling)
    folded: dict[int, set[str]] = {}
    for index in range(len(coupling.groups)):
        norms = _norms_before(source, graph, reads_of.get(index, []), lambda name, i=index: i in carried.get(name, ()))
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


def _group_of_slot(coupling: Coupling) -> np.ndarray:
    group_of_slot = np.full(coupling.slots + 1, -1, dtype=np.int64)
    for index, group in enumerate(coupling.groups):
        group_of_slot[group.start : group.start + group.size] = index
    return group_of_slot


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
        index = coupling.slots_of(operand.layer.numpy())
        return None if (index == coupling.slots).all() else Site(read.node, "masked", operand, index)
    operand = next((o for o in read.options if o.kind == "param"), read.options[0])
    index = coupling.slots_of(operand.layer.numpy())
    wanted = np.zeros(coupling.slots + 1, dtype=bool)
    wanted[coupling.slots_of(read.layer.numpy())] = True
    index = np.where(done[index] | ~wanted[index], coupling.slots, index)
    return None if (index == coupling.slots).all() else Site(read.node, operand.kind, operand, index)


def _norms_before(
    source: Source, graph: dict[str, fx.Node], reads: list[Read], carries: Callable[[str], bool]
) -> set[str]:
    """Batch norms that all reads of a group come from through homogeneous operators; empty if it is not so."""
    stack: list[fx.Node] = []
    for read in reads:
        operand = next((o for o in read.options if o.kind == "node"), None)
        if read.kind == "masked" or operand is None:
            return set()
        stack.append(graph[operand.name])
    norms: set[str] = set()
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name in seen or not carries(node.name):
            continue
        seen.add(node.name)
        if node.op == "call_module" and can_gate(source.module.get_submodule(str(node.target))):
            norms.add(node.name)
            continue
        if not _homogeneous(node, source):
            return set()
        stack.extend(node.all_input_nodes)
    return set() if _norm_feeds_norm(source, graph, norms, carries) else norms


def _homogeneous(node: fx.Node, source: Source) -> bool:
    name = op_name(node, source.module)
    if node.op not in ("call_module", "call_function", "call_method") or name not in HOMOGENEOUS:
        return False
    if name in ("add", "iadd"):
        return len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args) and not node.kwargs
    return True


def _norm_feeds_norm(
    source: Source, graph: dict[str, fx.Node], norms: set[str], carries: Callable[[str], bool]
) -> bool:
    """A channel that passes two gated norms in a row would be gated twice."""
    stack = [arg for name in norms for arg in graph[name].all_input_nodes]
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name in norms:
            return True
        if node.name in seen or not carries(node.name) or _mixes(node, source):
            continue
        seen.add(node.name)
        stack.extend(node.all_input_nodes)
    return False


def _mixes(node: fx.Node, source: Source) -> bool:
    name = op_name(node, source.module).lower()
    return name.startswith(("conv", "linear", "matmul", "bmm", "einsum")) and not _depthwise(node, source)


def _depthwise(node: fx.Node, source: Source) -> bool:
    if node.op != "call_module":
        return True  # a function: do not look behind it
    return getattr(source.module.get_submodule(str(node.target)), "groups", 1) > 1


def _groups_of_nodes(channels: ChannelMap, group_of_slot: np.ndarray, coupling: Coupling) -> dict[str, frozenset[int]]:
    """Which groups each node's value carries channels of."""
    known: dict[int, frozenset[int]] = {}
    found = {}
    for name, node in channels.nodes.items():
        groups: frozenset[int] = frozenset()
        for ids in node.tensors:
            for layer in ids.layers if ids else ():
                if id(layer) not in known:
                    slots = group_of_slot[coupling.slots_of(layer.numpy())]
                    known[id(layer)] = frozenset(np.unique(slots).tolist()) - {-1}
                groups |= known[id(layer)]
        found[name] = groups
    return found


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
