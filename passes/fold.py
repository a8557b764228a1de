"""Analysis: which batch norms can take the gates of all that is read behind them.

    bn -> relu -> (+ other bn) -> conv      bn's affine * gate: conv reads zeros at dead channels
    bn -> + map of one channel -> conv      not folded: what is added is no zero
    bn -> y[:, :, 0] = .7      -> conv      likewise, though the value that conv names is bn's own

A dead channel is exactly zero behind a gated batch norm. It has to stay so up to every read, through the operators in
between and through what is written in place into the memory of any value on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import fx

from tgfx.gated_layers import can_gate
from tgfx.ir.facts import ChannelMap, Read, TensorIds
from tgfx.ir.source import Source
from tgfx.ops.naming import is_torch_function, op_name
from tgfx.ops.pointwise import align
from tgfx.passes.couple import Coupling
from tgfx.passes.demand import Demand

# y(c * x) == c * y(x) for c >= 0, element by element or window by window
HOMOGENEOUS = {
    "relu", "ReLU", "leaky_relu", "LeakyReLU", "PReLU", "max_pool2d", "MaxPool2d", "avg_pool2d", "AvgPool2d",
    "MaxPool1d", "MaxPool3d", "AvgPool1d", "AvgPool3d", "adaptive_avg_pool2d", "AdaptiveAvgPool2d",
    "AdaptiveAvgPool1d", "Dropout", "AdaptiveAvgPool3d", "dropout", "Identity", "flatten", "Flatten", "view",
    "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", "cat", "add", "iadd", "interpolate",
    "Upsample", "getitem", "chunk", "split", "mean", "Dropout2d", "adaptive_max_pool2d", "AdaptiveMaxPool2d", "clone",
    "detach", "channel_shuffle", "ChannelShuffle", "unflatten", "Unflatten", "movedim",
}  # fmt: skip


class Folding:
    """Asked group by group; `norms` gives the batch norms that can take its gates, none if a read needs its own."""

    def __init__(self, source: Source, channels: ChannelMap, coupling: Coupling) -> None:
        self.source, self.channels, self.coupling = source, channels, coupling
        self.graph = {node.name: node for node in source.module.graph.nodes}
        self.demand = Demand(source.module)
        self._groups: dict[int, frozenset[int]] = {}  # of a layer, by its id
        self.group_of_slot = np.full(coupling.slots + 1, -1, dtype=np.int64)
        for index, group in enumerate(coupling.groups):
            self.group_of_slot[group.start : group.start + group.size] = index
        self.carried = {name: self._groups_in(node.tensors) for name, node in channels.nodes.items()}
        self.boxed = frozenset(group for box in self._boxes() for group in box)

    def norms(self, group: int, reads: list[Read]) -> set[str]:
        """Batch norms that all reads of a group come from, its dead channels zero all the way."""
        if group in self.boxed:
            return set()
        stack: list[tuple[fx.Node, bool]] = []  # with: whether it is there as a write
        for read in reads:
            operand = next((o for o in read.options if o.kind == "node"), None)
            if read.kind == "masked" or operand is None:
                return set()
            stack.extend(self._with_writes(self.graph[read.node], self.graph[operand.name]))
        norms: set[str] = set()
        seen: set[tuple[fx.Node, bool]] = set()
        while stack:
            node, writes = stack.pop()
            if (node, writes) in seen:
                continue
            seen.add((node, writes))
            if not self._concerns(node, group, writes):
                continue
            if self._is_gated_norm(node, group):
                norms.add(node.name)
                continue
            if not self._keeps_zeros(node, group):
                return set()
            for arg in node.all_input_nodes:
                stack.extend(self._with_writes(node, arg))
        return set() if self._norm_feeds_norm(norms, group) else norms

    def _with_writes(self, node: fx.Node, arg: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
        """An argument, and what wrote into its memory before this node reads it."""
        value, *writes = self.demand.operand(node, arg)
        yield value, False
        for write in writes:
            yield write, True

    def _concerns(self, node: fx.Node, group: int, writes: bool) -> bool:
        """Whether channels of the group are in a value; a write that gives none may be into any of them."""
        if writes and not self._layers_known(node):
            return True
        return group in self.carried.get(node.name, ())

    def _layers_known(self, node: fx.Node) -> bool:
        known = self.channels.nodes.get(node.name)
        return known is not None and len(known.tensors) > 0

    def _is_gated_norm(self, node: fx.Node, group: int) -> bool:
        """A batch norm whose own axis is the only one that the group lies on."""
        if node.op != "call_module" or not can_gate(self.source.module.get_submodule(str(node.target))):
            return False
        known = self.channels.nodes[node.name].single
        mine = self._layers_of(known, group)
        return len(mine) == 1 and known is not None and mine[0] is known.on_axis(1)[0]

    def _keeps_zeros(self, node: fx.Node, group: int) -> bool:
        """Whether the value is zero at dead channels where its operands are."""
        name = op_name(node, self.source.module)
        if node.op not in ("call_module", "call_function", "call_method") or name not in HOMOGENEOUS:
            return False
        if "pool" in name.lower() and node.name in self.channels.containers:
            return False  # along with where the largest entries lie
        return self._adds_zeros(node, group) if name in ("add", "iadd") else True

    def _adds_zeros(self, node: fx.Node, group: int) -> bool:
        """Every summand must be zero wherever the sum is dead: one that is broadcast over the channels is not."""
        summands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if len(node.args) != 2 or len(summands) != 2 or node.kwargs:
            return False
        layers = self._layers_of(self.channels.nodes[node.name].single, group)
        return all(self._covers(arg, layer, group) for arg in summands for layer in layers)

    def _covers(self, summand: fx.Node, layer: torch.Tensor, group: int) -> bool:
        """Whether a summand has the very channels of this layer of the sum, entry by entry."""
        known = self.channels.nodes.get(summand.name)
        own = self._layers_of(known.single if known else None, group)
        wanted = self.coupling.slots_of(layer.numpy())
        missing = self.group_of_slot[wanted] == group
        for one in own:
            slots = self.coupling.slots_of(align(one, layer.ndim).numpy())
            if all(size in (1, n) for size, n in zip(slots.shape, wanted.shape, strict=True)):
                missing = missing & (slots != wanted)
        return not missing.any()

    def _norm_feeds_norm(self, norms: set[str], group: int) -> bool:
        """A channel that passes two gated norms in a row would be gated twice."""
        stack = [arg for name in norms for arg in self.graph[name].all_input_nodes]
        seen: set[str] = set()
        while stack:
            node = stack.pop()
            if node.name in norms:
                return True
            if node.name in seen or group not in self.carried.get(node.name, ()) or _mixes(node, self.source):
                continue
            seen.add(node.name)
            stack.extend(node.all_input_nodes)
        return False

    # -- who carries what --------------------------------------------------------------------------------------

    def _groups_in(self, tensors: tuple[TensorIds | None, ...]) -> frozenset[int]:
        found = [self._groups_on(layer) for ids in tensors if ids for layer in ids.layers]
        return frozenset().union(*found)

    def _layers_of(self, ids: TensorIds | None, group: int) -> list[torch.Tensor]:
        return [layer for layer in (ids.layers if ids else ()) if group in self._groups_on(layer)]

    def _groups_on(self, layer: torch.Tensor) -> frozenset[int]:
        if id(layer) not in self._groups:
            found = self.group_of_slot[self.coupling.slots_of(layer.numpy())]
            self._groups[id(layer)] = frozenset(np.unique(found).tolist()) - {-1}
        return self._groups[id(layer)]

    def _boxes(self) -> Iterator[frozenset[int]]:
        """Groups that go into Python functions seen from outside only, which may write to them unseen."""
        for node in self.graph.values():
            if node.op == "call_function" and not is_torch_function(node):
                for arg in node.all_input_nodes:
                    yield self.carried.get(arg.name, frozenset())


def _mixes(node: fx.Node, source: Source) -> bool:
    name = op_name(node, source.module).lower()
    return name.startswith(("conv", "linear", "matmul", "bmm", "einsum")) and not _depthwise(node, source)


def _depthwise(node: fx.Node, source: Source) -> bool:
    if node.op != "call_module":
        return True  # a function: do not look behind it
    return getattr(source.module.get_submodule(str(node.target)), "groups", 1) > 1
