"""Transform: the physically smaller model.

Every parameter and buffer axis knows its atoms: slice them. Then bring the constants of the graph to the new sizes
(tgfx.ops.resize). The result holds torch's own modules and operators only, under the old names.

    x.view(b, g, c // g, h, w).transpose(1, 2).reshape(b, c, h, w)     a shuffle stays where each group keeps the same,
    x.index_select(1, kept_0)                                          and is one look-up of the survivors elsewhere
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tgfx.ir.dead_code import eliminate_dead_code
from tgfx.ir.facts import ChannelMap, Shuffle
from tgfx.ir.source import Source
from tgfx.ops.connection import is_connection, look_up
from tgfx.ops.naming import op_name, tapped_weight
from tgfx.ops.resize import resize
from tgfx.passes.cut_modules import ModuleCut
from tgfx.passes.cut_taps import TapCut, TapReader
from tgfx.passes.dead_branches import DeadBranches
from tgfx.passes.demand import Demand, is_check
from tgfx.passes.kept_positions import KeptPositions
from tgfx.passes.survivors import Survivors

_IN_ORDER = {"memory_format": torch.contiguous_format}  # as a reshape leaves it
_ARITHMETIC = {
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul,
    operator.floordiv, operator.truediv, operator.mod, operator.neg,
    operator.pow, operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge, min, max, int, float,
}  # fmt: skip


@dataclass(frozen=True)
class CutModel:
    """The smaller model; node_of: node of the source's graph -> the node that has its value now, where one has.

    reader_of: likewise the node that has its operands, where that is another one.
    """

    module: fx.GraphModule
    node_of: dict[str, str]
    reader_of: dict[str, str]


def cut(
    source: Source,
    channels: ChannelMap,
    survivors: Survivors,
    tensors: dict[str, Tensor],
    dead: DeadBranches = DeadBranches(),  # noqa: B008  (frozen)
    present: Survivors | None = None,
) -> fx.GraphModule:
    """The smaller model; see cut_with_places."""
    return cut_with_places(source, channels, survivors, tensors, dead, present).module


def cut_with_places(
    source: Source,
    channels: ChannelMap,
    survivors: Survivors,
    tensors: dict[str, Tensor],
    dead: DeadBranches,
    present: Survivors | None,
    *,
    keep_connections: bool = False,
) -> CutModel:
    """`tensors`: current parameters and buffers by name; `present`: what is left in them, if they were cut before.

    `keep_connections`: those that have nothing to do stay, for gates that are multiplied in there. Nothing given is
    changed.
    """
    surgeon = _Surgeon(source, channels, survivors, dead, keep_connections=keep_connections)
    graph = surgeon.rewrite_graph()
    modules = ModuleCut(source, surgeon, dead, surgeon.skipped, tensors, present, surgeon.taps)
    root = modules.cut()
    for name, constant in surgeon.constants.items():
        root.register_buffer(name, constant, persistent=False)
    compact = fx.GraphModule(root, graph, class_name=type(source.module).__name__)
    eliminate_dead_code(compact)
    modules.attach_rest(compact, root)
    return CutModel(compact, surgeon.places(), {old.name: new.name for old, new in surgeon.readers.items()})


class _Surgeon(KeptPositions):
    """Answers the resize rules (tgfx.ops.resize.Cut) and walks the graph."""

    def __init__(
        self,
        source: Source,
        channels: ChannelMap,
        survivors: Survivors,
        dead: DeadBranches,
        *,
        keep_connections: bool,
    ) -> None:
        super().__init__(channels, survivors)
        self.source, self.dead = source, dead
        self.keep_connections = keep_connections
        self.graph = fx.Graph()
        self.graph._codegen = source.module.graph._codegen
        self.constants: dict[str, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}
        self.readers: dict[fx.Node, fx.Node] = {}  # where several nodes take the place of one, the first of them
        # shuffles that become a look-up, by their last node; and what is not needed any more
        self.replaced = {s.nodes[-1]: s for s in channels.shuffles if not self._can_stay(s)}
        cuts = {name: TapCut.of(name, self) for name in channels.taps}
        self.taps = {name: taps for name, taps in cuts.items() if taps is not None}
        self.skipped = dead.nodes.union(*(shuffle.inside for shuffle in self.replaced.values()))

    @cached_property
    def demand(self) -> Demand:
        return Demand(self.source.module)

    # -- what resize rules ask --------------------------------------------------------------------------------

    def constant(self, indices: list[int]) -> fx.Node:
        name = f"kept_{len(self.constants)}"
        self.constants[name] = torch.tensor(indices, dtype=torch.int64)
        return self.graph.get_attr(name)

    # -- the graph ------------------------------------------------------------------------------------------------

    def rewrite_graph(self) -> fx.Graph:
        values = self.values
        by_name = {node.name: node for node in self.source.module.graph.nodes}
        for node in self.source.module.graph.nodes:
            same_as = self.dead.same_as(node.name)
            if same_as is not None:
                values[node] = self._passed_on(node, by_name[same_as], values[by_name[same_as]])
                continue
            if node.name in self.skipped:
                continue
            if node.name in self.replaced:
                shuffle = self.replaced[node.name]
                values[node] = self._reordered(by_name[shuffle.x], node, shuffle, values)
                continue
            if is_connection(node):
                values[node] = self._connected(node, values)
                continue
            weight = tapped_weight(node, self.taps)
            if weight is not None:
                values[node] = self._tapped(node, self.taps[weight], values)
                continue
            copy = self.graph.node_copy(node, lambda n: values[n] if isinstance(values[n], fx.Node) else n)
            copy.args = fx.node.map_arg(node.args, lambda n: values[n])
            copy.kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
            value = self._rewritten(node, copy)
            values[node] = value
            if value is copy:
                continue
            if not copy.users:
                self.graph.erase_node(copy)
            if isinstance(value, fx.Node):
                value.meta = dict(node.meta)
                if copy._erased:
                    value.name = copy.name
        return self.graph

    def _can_stay(self, shuffle: Shuffle) -> bool:
        """Whether the chain, brought to smaller sizes, still puts the survivors in order."""
        known = [self.channels.nodes[name].single for name in shuffle.inside]
        if not all(self.survivors.is_rectangular(ids) for ids in known if ids is not None):
            return False
        chain = [node for node in self.source.module.graph.nodes if node.name in shuffle.nodes]
        return all(self._shuffles_evenly(node) for node in chain)

    def _shuffles_evenly(self, node: fx.Node) -> bool:
        """A channel_shuffle of torch's own keeps its number of groups: each must keep the same of its channels."""
        if "channel_shuffle" in op_name(node):
            groups = node.args[1] if len(node.args) > 1 else node.kwargs["groups"]
        elif isinstance(module := self._module_of(node), nn.ChannelShuffle):
            groups = module.groups
        else:
            return True
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        kept = self.kept(x, 1)
        if kept is None:
            return True
        alive = np.isin(np.arange(self.before(x)[1]), kept).reshape(groups, -1)  # type: ignore[arg-type]
        return bool((alive == alive[0]).all())

    def _module_of(self, node: fx.Node) -> nn.Module | None:
        return self.source.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _reordered(self, x: fx.Node, node: fx.Node, shuffle: Shuffle, values: dict[fx.Node, Any]) -> fx.Node:
        """x.index_select(...) in the place of the last node of a shuffle."""
        before, after = self.left(x, shuffle.axis), self.left(node, shuffle.axis)
        index = self.constant(look_up(before, [shuffle.order[position] for position in after]))
        args = (values[x], shuffle.axis, index)
        copy = self.graph.create_node("call_function", torch.index_select, args, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _connected(self, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
        """What is left on the other side of a connection, looked up in what is left on this one; zeros for the rest."""
        x, axis, _ = node.args
        before, after = self.left(x, axis), self.left(node, axis)  # type: ignore[arg-type]
        value = values[x]  # type: ignore[index]
        if before == after and not self.keep_connections:
            return value
        if before == after:
            return self.graph.node_copy(node, lambda n: values[n])
        places = look_up(before, after)
        if max(places) == len(before):
            padding = [0, 0] * (len(self.before(node)) - 1 - axis) + [0, 1]  # type: ignore[operator]
            value = self.graph.call_function(F.pad, (value, padding))
            value.meta = dict(node.meta)
            self.readers[node] = value
        copy = self.graph.call_function(torch.index_select, (value, axis, self.constant(places)))
        copy.meta = dict(node.meta)
        return copy

    def _tapped(self, node: fx.Node, taps: TapCut, values: dict[fx.Node, Any]) -> fx.Node:
        """The call of a layer that has lost taps."""
        x: fx.Node = node.args[0] if node.args else node.kwargs["input"]  # type: ignore[assignment]
        module = self.source.module.get_submodule(str(node.target))
        axis = len(self.before(x)) - taps.alive.ndim
        reader = TapReader(self.graph, module, axis, self.constant)
        if taps.alive.any():
            args = (reader.read(values[x], taps),)
            copy = self.graph.create_node("call_module", str(node.target), args, name=node.name)
        else:
            bias = None if module.bias is None else self.graph.get_attr(f"{node.target}.bias")
            copy = reader.nothing(values[x], len(self.left(node, axis)), bias)
        copy.meta = dict(node.meta)
        return copy

    def _passed_on(self, node: fx.Node, left: fx.Node, value: fx.Node) -> fx.Node:
        """What is left of an addition is a tensor that others may hold: what writes into one must not be seen in both.

        An addition into what is left (`x += branch`) gave that very tensor all along.
        """
        demand = self.demand
        into = node.args[0] is left and demand.writes(node)
        if into or not (demand.is_written_after(node, node) or demand.is_written_after(left, node)):
            return value
        return self._copied(node, value)

    def _copied(self, node: fx.Node, value: fx.Node, **form: Any) -> fx.Node:
        copied = self.graph.call_method("clone", (value,), form)
        copied.meta = dict(node.meta)
        return copied

    def places(self) -> dict[str, str]:
        """Asked when dead code is gone."""
        living = set(self.graph.nodes)
        return {old.name: new.name for old, new in self.values.items() if isinstance(new, fx.Node) and new in living}

    def _rewritten(self, node: fx.Node, copy: fx.Node) -> Any:
        is_pick = node.op == "call_function" and node.target is operator.getitem
        if is_pick and not isinstance(copy.args[0], fx.Node) and isinstance(copy.args[1], int | slice):
            return copy.args[0][copy.args[1]]  # a size that is known by now
        if node.op == "call_function" and node.target in _ARITHMETIC and not copy.all_input_nodes:
            return node.target(*copy.args, **copy.kwargs)
        if is_check(node) and copy.args and copy.args[0] is True:
            return None  # it was about channels alone, and they are what they are now
        value = resize(self, node, copy, self.source.module)
        if node.name in self.channels.const_nodes and isinstance(value, fx.Node):
            return self._slice_constant(node, value)
        return self._own_memory(node, value) if node.name in self.channels.copies else value

    def _own_memory(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """A copy stays one: `x.permute(0, 2, 3, 1).contiguous()` is a view of x where one channel is left."""
        x = node.all_input_nodes[0]
        if all(self.kept(x, axis) is None for axis in range(len(self.before(x)))):
            return value
        if not (self.demand.is_written_after(node, node) or self.demand.is_written_after(x, node)):
            return value
        in_order = not (op_name(node) == "contiguous" and (node.kwargs or len(node.args) > 1))
        with self.graph.inserting_after(value):
            return self._copied(node, value, **(_IN_ORDER if in_order else {}))

    def _slice_constant(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        for axis in range(len(self.before(node))):
            kept = self.kept(node, axis)
            if kept is not None:
                with self.graph.inserting_after(copy):
                    index = self.constant(kept)
                with self.graph.inserting_after(index):
                    copy = self.graph.call_function(torch.index_select, (copy, axis, index))
        return copy
