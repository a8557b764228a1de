"""Transform: the physically smaller model.

Every parameter and buffer axis knows its atoms: slice them. Then bring the constants of the graph to the new sizes
(tgfx.ops.resize). The result holds torch's own modules and operators only, under the old names.

    x.view(b, g, c // g, h, w).transpose(1, 2).reshape(b, c, h, w)     a shuffle stays where each group keeps the same,
    x.index_select(1, kept_0)                                          and is one look-up of the survivors elsewhere
"""

from __future__ import annotations

import copy
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
from tgfx.ir.take import take
from tgfx.ir.tree import find, has_module, put_in_order, put_module, put_tensor
from tgfx.ops.connection import is_connection, look_up
from tgfx.ops.modules import cut_module, is_resizable_module
from tgfx.ops.naming import op_name
from tgfx.ops.resize import resize
from tgfx.passes.dead_branches import DeadBranches, parameters_of
from tgfx.passes.demand import Demand, is_check
from tgfx.passes.survivors import Survivors

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
    root = surgeon.cut_modules(tensors, present)
    for name, constant in surgeon.constants.items():
        root.register_buffer(name, constant, persistent=False)
    compact = fx.GraphModule(root, graph, class_name=type(source.module).__name__)
    eliminate_dead_code(compact)
    surgeon.attach_rest(compact, root)
    return CutModel(compact, surgeon.places(), {old.name: new.name for old, new in surgeon.readers.items()})


class _Surgeon:
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
        self.source, self.channels, self.survivors, self.dead = source, channels, survivors, dead
        self.keep_connections = keep_connections
        self.gone = parameters_of(source, dead.nodes) if dead.nodes else set()
        self.called: dict[bool, set[str]] = {True: set(), False: set()}  # layers by whether their call stays
        for node in source.module.graph.nodes:
            if node.op == "call_module":
                self.called[node.name not in dead.nodes].add(str(node.target))
        self.graph = fx.Graph()
        self.graph._codegen = source.module.graph._codegen
        self.constants: dict[str, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}
        self.readers: dict[fx.Node, fx.Node] = {}  # where several nodes take the place of one, the first of them
        self._kept: dict[tuple[str, int], list[np.ndarray | None]] = {}
        # shuffles that become a look-up, by their last node; and what is not needed any more
        self.replaced = {s.nodes[-1]: s for s in channels.shuffles if not self._can_stay(s)}
        self.skipped = dead.nodes.union(*(shuffle.inside for shuffle in self.replaced.values()))

    @cached_property
    def demand(self) -> Demand:
        return Demand(self.source.module)

    # -- what resize rules ask --------------------------------------------------------------------------------

    def is_tensor(self, node: fx.Node) -> bool:
        known = self.channels.nodes.get(node.name)
        return known is not None and len(known.tensors) == 1 and node.name not in self.channels.containers

    def before(self, node: fx.Node, index: int = 0) -> tuple[int, ...]:
        ids = self.channels.nodes[node.name].tensors[index]
        if ids is None:
            raise IndexError(index)
        return ids.shape

    def kept(self, node: fx.Node, axis: int, index: int = 0) -> list[int] | None:
        key = (node.name, index)
        if key not in self._kept:
            ids = self.channels.nodes[node.name].tensors[index]
            self._kept[key] = self.survivors.kept(ids) if ids is not None else []
        found = self._kept[key][axis] if self._kept[key] else None
        return None if found is None else found.tolist()

    def seen(self, node: fx.Node) -> tuple[tuple, dict]:
        return self.channels.seen_args[node.name]

    def groups(self, node: fx.Node, before: int) -> int:
        """Groups that are left of a grouped convolution or GroupNorm."""
        if self.channels.grouping.get(node.name) != "within":
            return before
        x = node.args[0] if node.args else node.kwargs["input"]
        kept = self.kept(x, 1)  # type: ignore[arg-type]
        return before if kept is None else before * len(kept) // self.before(x)[1]  # type: ignore[arg-type]

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
        before, after = self._left(x, shuffle.axis), self._left(node, shuffle.axis)
        index = self.constant(look_up(before, [shuffle.order[position] for position in after]))
        args = (values[x], shuffle.axis, index)
        copy = self.graph.create_node("call_function", torch.index_select, args, name=node.name)
        copy.meta = dict(node.meta)
        return copy

    def _connected(self, node: fx.Node, values: dict[fx.Node, Any]) -> fx.Node:
        """What is left on the other side of a connection, looked up in what is left on this one; zeros for the rest."""
        x, axis, _ = node.args
        before, after = self._left(x, axis), self._left(node, axis)  # type: ignore[arg-type]
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

    def _left(self, node: fx.Node, axis: int) -> list[int]:
        """Positions along an axis that stay, where that is all of them too."""
        kept = self.kept(node, axis)
        return list(range(self.before(node)[axis])) if kept is None else kept

    def _passed_on(self, node: fx.Node, left: fx.Node, value: fx.Node) -> fx.Node:
        """What is left of an addition is a tensor that others may hold: what writes into one must not be seen in both.

        An addition into what is left (`x += branch`) gave that very tensor all along.
        """
        demand = self.demand
        into = node.args[0] is left and demand.writes(node)
        if into or not (demand.is_written_after(node, node) or demand.is_written_after(left, node)):
            return value
        copied = self.graph.call_method("clone", (value,))
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
        return value

    def _slice_constant(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        for axis in range(len(self.before(node))):
            kept = self.kept(node, axis)
            if kept is not None:
                with self.graph.inserting_after(copy):
                    index = self.constant(kept)
                with self.graph.inserting_after(index):
                    copy = self.graph.call_function(torch.index_select, (copy, axis, index))
        return copy

    # -- modules and tensors --------------------------------------------------------------------------------------

    def cut_modules(self, tensors: dict[str, Tensor], present: Survivors | None) -> nn.Module:
        root = nn.Module()
        root.training = self.source.module.training
        self.sliced = self._sliced(tensors, present)
        group_counts, shapes = self._group_counts(), self._input_shapes()
        gone: set[str] = set()
        for path, module in self.source.module.named_modules():
            if not path or isinstance(module, fx.GraphModule):
                continue
            if path.rpartition(".")[0] in gone or self._is_gone(path, module):
                gone.add(path)
                continue
            own = {
                name: self.sliced[f"{path}.{name}"]
                for name in [*module._parameters, *module._buffers]
                if f"{path}.{name}" in self.sliced
            }
            if is_resizable_module(module) and not isinstance(module, nn.Sequential | nn.ModuleList):
                smaller = cut_module(module, own, group_counts.get(path), shapes.get(path))
                smaller._modules = {}
            else:
                smaller = _container(module, own) if not self._called(path) else _shallow(module, own)
            smaller.training = module.training
            put_module(root, path, smaller)
        for name in [*self.source.module._parameters, *self.source.module._buffers]:
            if name in self.sliced:
                put_tensor(root, name, self.sliced[name], self.source.module)
        return root

    def _is_gone(self, path: str, module: nn.Module) -> bool:
        """No call of it, or of a layer in it, is left, and so no tensor of it either."""
        if not self.dead.nodes or any(_within(called, path) for called in self.called[True]):
            return False
        own = [f"{path}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if not own:
            return any(_within(called, path) for called in self.called[False])
        return all(name in self.gone for name in own)

    def _called(self, path: str) -> bool:
        """A closed box: keeps its own class, and all below it."""
        boxes = {str(n.target) for n in self.source.module.graph.nodes if n.op == "call_module"}
        return any(path == box or path.startswith(box + ".") for box in boxes)

    def _sliced(self, tensors: dict[str, Tensor], present: Survivors | None) -> dict[str, Tensor]:
        sliced: dict[str, Tensor] = {}
        done: dict[int, Tensor] = {}
        for table in (self.channels.params, self.channels.buffers):
            for name, ids in table.items():
                if name in self.gone:
                    continue
                tensor = tensors[name]
                if id(tensor) not in done:
                    smaller = take(tensor, self.survivors.kept_of(ids, present))
                    if isinstance(tensor, nn.Parameter):
                        smaller = nn.Parameter(smaller, tensor.requires_grad)
                    done[id(tensor)] = smaller
                sliced[name] = done[id(tensor)]
        return sliced

    def _input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape, after the cut, of what each layer is called with."""
        shapes = {}
        for node in self.source.module.graph.nodes:
            if node.op == "call_module" and node.args and isinstance(node.args[0], fx.Node):
                x = node.args[0]
                if self.is_tensor(x) and x.name not in self.skipped and node.name not in self.skipped:
                    kept = [self.kept(x, axis) for axis in range(len(self.before(x)))]
                    sizes = zip(kept, self.before(x), strict=True)
                    shapes[str(node.target)] = tuple(size if k is None else len(k) for k, size in sizes)
        return shapes

    def _group_counts(self) -> dict[str, int]:
        counts = {}
        for node in self.source.module.graph.nodes:
            if node.op == "call_module" and node.name in self.channels.grouping and node.name not in self.dead.nodes:
                module = self.source.module.get_submodule(str(node.target))
                before = getattr(module, "groups", None) or getattr(module, "num_groups", 1)
                counts[str(node.target)] = self.groups(node, before)
        return counts

    def attach_rest(self, compact: fx.GraphModule, root: nn.Module) -> None:
        """Tensors the graph does not use stay too, under their names."""
        for path, module in root.named_modules():
            if path and not has_module(compact, path):
                compact.add_submodule(path, module)
        for name, tensor in self.sliced.items():
            if find(compact, name) is None:
                put_tensor(compact, name, tensor, self.source.module)
        for path, module in root.named_modules():
            compact.get_submodule(path)._non_persistent_buffers_set |= module._non_persistent_buffers_set
        put_in_order(compact, self.source.module)
        compact.train(self.source.module.training)
        for path, module in self.source.module.named_modules():
            if path and has_module(compact, path):
                compact.get_submodule(path).training = module.training


def _within(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


def _container(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    plain = nn.Module()
    plain._parameters = {n: own.get(n) for n in module._parameters}  # type: ignore[assignment]
    plain._buffers = {n: own.get(n) for n in module._buffers}
    plain._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return plain


def _shallow(module: nn.Module, own: dict[str, Tensor]) -> nn.Module:
    smaller = copy.copy(module)
    smaller._parameters = {n: own.get(n) for n in module._parameters}  # type: ignore[assignment]
    smaller._buffers = {n: own.get(n) for n in module._buffers}
    smaller._modules = {}
    return smaller
