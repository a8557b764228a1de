"""Transform: write the gates into a copy of the graph.

conv1(x)  ->  F.conv2d(x, conv1.weight * bank[index], conv1.bias, ...)
bn(x)     ->  bn(x, bank[index])
ln(x)     ->  masked_layer_norm(x, bank[index], ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx, nn

from tgfx.gated_layers import gated_batch_norm
from tgfx.ir.constants import Constants, beside
from tgfx.ir.source import Source
from tgfx.ir.tree import named_tensors
from tgfx.ops import masked
from tgfx.ops.masked_call import masked_call, masked_module_call
from tgfx.ops.modules import lower
from tgfx.ops.naming import op_name
from tgfx.passes.gate_routes import moved_value
from tgfx.passes.place import Placement, Site

BANK = "gate_bank"
INDEX = "gate_index"


class GateIndex(Constants):
    """Holds the index tensors (not saved: they follow from the model)."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[tuple, str] = {}

    def keep(self, index: np.ndarray) -> str:
        key = (index.shape, index.tobytes())
        if key not in self._names:
            self._names[key] = f"i{len(self._names)}"
            self.keep_constant(self._names[key], torch.from_numpy(index.copy()))
        return self._names[key]


@dataclass
class GatedGraph:
    """A gated graph, the index tensors it names, and layers to swap for gated twins (by path)."""

    graph: fx.Graph
    indices: GateIndex
    twins: dict[str, nn.Module]


def insert_gates(source: Source, placement: Placement, like: GatedGraph | None = None) -> GatedGraph:
    """`like`: another graph of the same model, whose index tensors and twins are shared."""
    writer = _Writer(source, like)
    by_node: dict[str, list[Site]] = {}
    for site in placement.sites:
        by_node.setdefault(site.node, []).append(site)
    for node in source.module.graph.nodes:
        writer.write(node, by_node.get(node.name, []))
    for graph in (writer.graph, *([like.graph] if like else [])):
        _gate_other_calls(graph, writer.twins)
        graph.lint()
    return GatedGraph(writer.graph, writer.indices, writer.twins)


def _gate_other_calls(graph: fx.Graph, twins: dict[str, nn.Module]) -> None:
    """A swapped layer that is called elsewhere without a gate there takes all ones."""
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in twins and len(node.args) + len(node.kwargs) == 1:
            with graph.inserting_before(node):
                ones = graph.call_function(torch.ones, (twins[str(node.target)].num_features,))
            node.args, node.kwargs = (*node.args, *node.kwargs.values(), ones), {}


class _Writer:
    def __init__(self, source: Source, like: GatedGraph | None) -> None:
        self.source = source
        self.graph = fx.Graph(tracer_cls=source.module.graph._tracer_cls)
        self.graph._codegen = source.module.graph._codegen
        self.copies: dict[fx.Node, fx.Node] = {}
        self.by_name = {node.name: node for node in source.module.graph.nodes}
        self.parameters = dict(named_tensors(source.module))
        first: dict[int, str] = {}
        for name, parameter in self.parameters.items():
            first.setdefault(id(parameter), name)
        # a tied parameter goes by the first of its names
        self.first_name = {name: first[id(parameter)] for name, parameter in self.parameters.items()}
        self.indices = like.indices if like else GateIndex()
        self.twins: dict[str, nn.Module] = like.twins if like else {}
        self.bank: fx.Node | None = None
        self.values: dict[str, fx.Node] = {}

    def write(self, node: fx.Node, sites: list[Site]) -> None:
        if self.bank is None and node.op != "placeholder":
            self.bank = self.graph.call_module(BANK)
        for site in sites:  # gate values stand before whatever uses them
            self._value(site.index)
            if site.times is not None:
                self._value(site.times)
        gated_params: dict[str, list[fx.Node]] = {}  # a weight's channels and its taps have gates each
        for site in sites:
            if site.kind == "param" and site.operand:
                gated_params.setdefault(site.operand.name, []).append(self._value(site.index))
        swap: dict[fx.Node, fx.Node] = {}  # what is read along two axes has two gates
        for site in sites:
            if site.kind == "node" and site.operand:
                own = self.by_name[site.operand.name]
                swap[own] = self._times(swap.get(own) or self.copies[own], self._gate_of(site))
        at = {s.position: self._value(s.index) for s in sites if s.kind == "edge"}
        norm_site = next((s for s in sites if s.kind == "batch_norm"), None)
        norm_gate = self._norm_gate(norm_site) if norm_site is not None else None

        served: set[str] = set()

        def remap(arg: fx.Node) -> fx.Node:
            name = self.first_name.get(str(arg.target)) if arg.op == "get_attr" else None
            if name in gated_params:
                served.add(name)
                return self._times(self.copies[arg], *gated_params[name])
            return swap.get(arg) or self.copies[arg]

        masks = [self._gate_of(site) for site in sites if site.kind == "masked"]
        copy = self.graph.node_copy(node, remap)
        if node.op != "call_module" and served != set(gated_params):
            raise AssertionError(f"{node.name}: gates for {set(gated_params) - served} found no place")
        if at:
            self._gate_arguments(copy, at)
        if masks:
            copy = self._replace(copy, self._masked(copy, masks))
        elif norm_gate is not None:
            path = str(node.target)
            self.twins.setdefault(path, gated_batch_norm(self.source.module.get_submodule(path)))
            copy.args, copy.kwargs = (copy.args[0] if copy.args else copy.kwargs["input"], norm_gate), {}
        elif gated_params and node.op == "call_module":
            copy = self._replace(copy, self._lowered(copy, gated_params))
        copy.meta = dict(node.meta)
        self.copies[node] = copy

    def _norm_gate(self, site: Site) -> fx.Node:
        gate = self._value(site.index)
        return gate if site.times is None else self._times(gate, self._value(site.times))

    def _gate_arguments(self, copy: fx.Node, at: dict[int | None, fx.Node]) -> None:
        """Gate values for single arguments, by position: the same value may stand there twice with two gates."""
        with self.graph.inserting_before(copy):
            copy.args = tuple(
                self._times(arg, at[index]) if index in at else arg  # type: ignore[arg-type]
                for index, arg in enumerate(copy.args)
            )

    def _value(self, index: np.ndarray) -> fx.Node:
        """Gate values in the shape of `index`."""
        name = self.indices.keep(index)
        if name not in self.values:
            at = self.graph.create_node("get_attr", f"{INDEX}.{name}", name="gate_at")
            self.values[name] = self.graph.create_node("call_function", _pick, (self.bank, at), name="gate_value")
        return self.values[name]

    def _gate_of(self, site: Site) -> fx.Node:
        """Gate values in the layout of the site's operand."""
        gate, route = self._value(site.index), site.operand.route if site.operand else None
        if route is None:
            return gate
        like = self.copies[self.by_name[route.node]]
        gate = self.graph.create_node("call_function", masked.spread, (gate, like), name="gate_spread")
        for name in route.moves:
            gate = self._moved(self.by_name[name], gate)
        return gate

    def _moved(self, move: fx.Node, gate: fx.Node) -> fx.Node:
        """A gate through a node that moves data; pointwise operators before it leave a gate as it is."""
        known = {**self.copies, moved_value(move): gate}
        args, kwargs = fx.node.map_arg((move.args, move.kwargs), known.__getitem__)
        return self.graph.create_node(move.op, _reshaping(move.target), args, kwargs, name="gate_moved")

    def _times(self, tensor: fx.Node, *gates: fx.Node) -> fx.Node:
        """Named apart, so that the model's own nodes keep their names."""
        for gate in gates:
            tensor = self.graph.create_node("call_function", masked.gate_times, (tensor, gate), name="gated")
        return tensor

    def _lowered(self, copy: fx.Node, gated: dict[str, list[fx.Node]]) -> Callable[[], fx.Node]:
        path = str(copy.target)
        module = self.source.module.get_submodule(path)

        def build() -> fx.Node:
            weights = {}
            for name, values in gated.items():
                last = self._name_in(module, name)
                own = self.graph.create_node("get_attr", f"{path}.{last}", name="gate_operand")
                weights[last] = self._times(own, *values)
            return lower(self.graph, copy, module, weights)

        return build

    def _name_in(self, module: nn.Module, name: str) -> str:
        """What a (perhaps tied) parameter is called inside this layer."""
        return next(n for n, p in module.named_parameters() if p is self.parameters[name])

    def _masked(self, copy: fx.Node, gates: list[fx.Node]) -> Callable[[], fx.Node]:
        def build() -> fx.Node:
            gate = self._times(*gates)  # an entry lives if it does along every axis
            is_module = copy.op == "call_module"
            call = masked_module_call(self.graph, copy, self.source.module) if is_module else masked_call(copy)
            if call is None:
                raise AssertionError(f"{copy.name}: {op_name(copy)} has no masked form")
            return self.graph.call_function(call.form, (call.x, gate, *call.values))

        return build

    def _replace(self, copy: fx.Node, build: Callable[[], fx.Node]) -> fx.Node:
        with self.graph.inserting_before(copy):
            new = build()
        name = copy.name
        copy.replace_all_uses_with(new)
        self.graph.erase_node(copy)
        new.name = name  # free again, though the namespace does not know
        return new


def _reshaping(target: fx.node.Target) -> fx.node.Target:
    """What is expanded cannot always be viewed where the value itself can."""
    if target in ("view", "view_as"):
        return "reshape" if target == "view" else "reshape_as"
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    return torch.ops.aten.reshape.default if target in views else target


def _pick(bank: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """bank[index], with the shape of index."""
    return bank.index_select(0, beside(index, bank).reshape(-1)).reshape(index.shape)
