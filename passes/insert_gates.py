"""Transform: write the gates into a copy of the graph.

conv1(x)  ->  F.conv2d(x, conv1.weight * bank[index], conv1.bias, ...)
bn(x)     ->  bn(x, bank[index])
ln(x)     ->  masked_layer_norm(x, bank[index], ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from tgfx.gated_layers import gated_batch_norm
from tgfx.ir.constants import Constants, beside
from tgfx.ir.source import Source
from tgfx.ir.tree import named_tensors
from tgfx.ops import masked
from tgfx.ops.modules import lower
from tgfx.ops.naming import op_name
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
        if node.op == "call_module" and str(node.target) in twins and len(node.args) == 1:
            with graph.inserting_before(node):
                ones = graph.call_function(torch.ones, (twins[str(node.target)].num_features,))
            node.args = (node.args[0], ones)


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
        inputs = {s.operand.name: s for s in sites if s.kind == "node" and s.operand}
        swap = {self.source_node(name): self._gated_input(name, site) for name, site in inputs.items()}
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

        copy = self.graph.node_copy(node, remap)
        if node.op != "call_module" and served != set(gated_params):
            raise AssertionError(f"{node.name}: gates for {set(gated_params) - served} found no place")
        masked_site = next((s for s in sites if s.kind == "masked"), None)
        if at:
            self._gate_arguments(copy, at)
        if masked_site is not None:
            copy = self._replace(copy, self._masked(copy, masked_site))
        elif norm_gate is not None:
            path = str(node.target)
            self.twins.setdefault(path, gated_batch_norm(self.source.module.get_submodule(path)))
            copy.args = (copy.args[0], norm_gate)
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

    def source_node(self, name: str) -> fx.Node:
        return self.by_name[name]

    def _value(self, index: np.ndarray) -> fx.Node:
        """Gate values in the shape of `index`."""
        name = self.indices.keep(index)
        if name not in self.values:
            at = self.graph.create_node("get_attr", f"{INDEX}.{name}", name="gate_at")
            self.values[name] = self.graph.create_node("call_function", _pick, (self.bank, at), name="gate_value")
        return self.values[name]

    def _times(self, tensor: fx.Node, *gates: fx.Node) -> fx.Node:
        """Named apart, so that the model's own nodes keep their names."""
        for gate in gates:
            tensor = self.graph.create_node("call_function", masked.gate_times, (tensor, gate), name="gated")
        return tensor

    def _gated_input(self, name: str, site: Site) -> fx.Node:
        source = self.source_node(name)
        return self._times(self.copies[source], self._value(site.index))

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

    def _masked(self, copy: fx.Node, site: Site) -> Callable[[], fx.Node]:
        gate = self._value(site.index)
        if copy.op == "call_module":
            return lambda: _masked_module(self.graph, copy, self.source.module, gate)
        return lambda: _masked_function(self.graph, copy, gate)

    def _replace(self, copy: fx.Node, build: Callable[[], fx.Node]) -> fx.Node:
        with self.graph.inserting_before(copy):
            new = build()
        name = copy.name
        copy.replace_all_uses_with(new)
        self.graph.erase_node(copy)
        new.name = name  # free again, though the namespace does not know
        return new


def _pick(bank: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """bank[index], with the shape of index."""
    return bank.index_select(0, beside(index, bank).reshape(-1)).reshape(index.shape)


def _masked_module(graph: fx.Graph, copy: fx.Node, root: nn.Module, gate: fx.Node) -> fx.Node:
    path = str(copy.target)
    module = root.get_submodule(path)
    x = copy.args[0]
    weight = graph.get_attr(f"{path}.weight") if module.weight is not None else None
    if isinstance(module, nn.RMSNorm):
        args: tuple[Any, ...] = (x, gate, list(module.normalized_shape), weight, module.eps)
        return graph.call_function(masked.masked_rms_norm, args)
    bias = graph.get_attr(f"{path}.bias") if module.bias is not None else None
    if isinstance(module, nn.GroupNorm):
        args = (x, gate, module.num_groups, weight, bias, module.eps)
        return graph.call_function(masked.masked_group_norm, args)
    args = (x, gate, list(module.normalized_shape), weight, bias, module.eps)
    return graph.call_function(masked.masked_layer_norm, args)


_AFFINE = (("weight", None), ("bias", None), ("eps", 1e-5))
_STATISTICS = (("running_mean", None), ("running_var", None))
_UPDATE = (("training", False), ("momentum", 0.1), ("eps", 1e-5))
_SPREAD = (("dim", None), ("correction", 1), ("keepdim", False))
# operator -> its masked form, and the operator's arguments after the input with their defaults
_FORMS: dict[str, tuple[Callable, tuple[tuple[str, Any], ...]]] = {
    "mean": (masked.masked_mean, (("dim", None), ("keepdim", False), ("dtype", None))),
    "var": (masked.masked_var, _SPREAD),
    "std": (masked.masked_std, _SPREAD),
    "layer_norm": (masked.masked_layer_norm, (("normalized_shape", None), *_AFFINE)),
    "rms_norm": (masked.masked_rms_norm, (("normalized_shape", None), ("weight", None), ("eps", None))),
    "group_norm": (masked.masked_group_norm, (("num_groups", None), *_AFFINE)),
    "batch_norm": (masked.masked_batch_norm, (*_STATISTICS, *_AFFINE[:2], *_UPDATE)),
}

# where the ATen operator takes its arguments in another order than the function of torch.nn.functional
_ATEN_ORDER = {"batch_norm": ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")}


def _masked_function(graph: fx.Graph, copy: fx.Node, gate: fx.Node) -> fx.Node:
    form, signature = _FORMS[op_name(copy)]
    given = dict(copy.kwargs)
    if "unbiased" in given:
        given["correction"] = 1 if given.pop("unbiased") else 0
    if "axis" in given:
        given["dim"] = given.pop("axis")
    rest = list(copy.args[1:])
    if op_name(copy) in ("var", "std") and len(rest) > 1 and isinstance(rest[1], bool):
        rest[1] = 1 if rest[1] else 0  # the old spelling: unbiased
    is_aten = isinstance(copy.target, torch._ops.OpOverload)
    names = _ATEN_ORDER.get(op_name(copy)) if is_aten else None
    given.update(zip(names or [name for name, _ in signature], rest, strict=False))
    x = copy.args[0] if copy.args else given.pop("input")
    values = []
    for name, default in signature:
        value = given.get(name, default)
        values.append(default if value is None and name == "correction" else value)
    return graph.call_function(form, (x, gate, *values))
