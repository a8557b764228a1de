"""Transform: put a gate on whole weights, in a copy of the graph.

    conv1(x)      ->  g = gate_bank["conv1.weight"](conv1.weight);  lean_conv2d(g, x, g, conv1.bias, ...)
    linear(x, w)  ->  lean_linear(g, x, g)
    w[:8]         ->  g[:8]        a tied or sliced weight has one gate

The gate of a weight is called once, just before the first reader.
"""

from __future__ import annotations

import operator

import torch.nn.functional as F
from torch import fx, nn

from tgfx.bank import GateBank
from tgfx.ir.source import Source
from tgfx.ops.modules import lower
from tgfx.ops.naming import op_name
from tgfx.ops.recompute import LEAN
from tgfx.passes.insert_gates import BANK
from tgfx.passes.weight_uses import first_names


def insert_weight_gates(source: Source, gated: set[str]) -> fx.Graph:
    """`gated`: names of the parameters that have a gate, tied ones by the first of their names."""
    writer = _Writer(source, gated)
    for node in source.module.graph.nodes:
        writer.write(node)
    for gate in writer.gates.values():
        _read_leanly(writer.graph, gate)
    writer.graph.lint()
    return writer.graph


class _Writer:
    def __init__(self, source: Source, gated: set[str]) -> None:
        self.source, self.gated = source, gated
        self.graph = fx.Graph(tracer_cls=source.module.graph._tracer_cls)
        self.graph._codegen = source.module.graph._codegen
        self.first_name = first_names(source.module)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.gates: dict[str, fx.Node] = {}

    def write(self, node: fx.Node) -> None:
        for arg in node.all_input_nodes:  # gates stand before whoever reads them
            if arg.op == "get_attr" and self._name(str(arg.target)) is not None:
                self._gate(str(arg.target), self.copies[arg])
        copy = self.graph.node_copy(node, self._value)
        if node.op == "call_module":
            copy = self._lowered(copy)
        copy.meta = dict(node.meta)
        self.copies[node] = copy

    def _name(self, target: str) -> str | None:
        name = self.first_name.get(target)
        return name if name in self.gated else None

    def _value(self, arg: fx.Node) -> fx.Node:
        name = self._name(str(arg.target)) if arg.op == "get_attr" else None
        return self.gates[name] if name is not None else self.copies[arg]

    def _gate(self, target: str, weight: fx.Node | None = None) -> fx.Node:
        name = self.first_name[target]
        if name not in self.gates:
            weight = weight or self.graph.create_node("get_attr", target, name="gate_operand")
            gate = f"{BANK}.{GateBank.key(name)}"
            self.gates[name] = self.graph.create_node("call_module", gate, (weight,), name="gated")
        return self.gates[name]

    def _lowered(self, copy: fx.Node) -> fx.Node:
        path = str(copy.target)
        module = self.source.module.get_submodule(path)
        own = [name for name, _ in module.named_parameters() if self._name(f"{path}.{name}") is not None]
        if not own:
            return copy
        with self.graph.inserting_before(copy):
            weights = {name: self._gate(f"{path}.{name}") for name in own}
            new = (
                _embedding(self.graph, copy, module, weights["weight"])
                if type(module) is nn.Embedding
                else lower(self.graph, copy, module, weights)
            )
        name = copy.name
        copy.replace_all_uses_with(new)
        self.graph.erase_node(copy)
        new.name = name  # free again, though the namespace does not know
        return new


def _embedding(graph: fx.Graph, node: fx.Node, module: nn.Embedding, weight: fx.Node) -> fx.Node:
    x = node.args[0] if node.args else node.kwargs["input"]
    return graph.call_function(F.embedding, (x, weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq))


def _read_leanly(graph: fx.Graph, gate: fx.Node) -> None:
    """Convolutions and linear layers compute the gated weight again in backward instead of keeping it."""
    readers = [user for user in gate.users if _reads(user, gate)]
    for part in [user for user in gate.users if user.op == "call_function" and user.target is operator.getitem]:
        for reader in [user for user in part.users if _reads(user, part)]:
            _lean(reader, gate)
    if len(readers) == len(gate.users) == 1:
        gate.kwargs = {"owned": True}
    for reader in readers:
        _lean(reader, gate)


def _reads(node: fx.Node, weight: fx.Node) -> bool:
    if node.op != "call_function" or op_name(node) not in LEAN:
        return False
    operands = [arg for arg in (*node.args, *node.kwargs.values()) if arg is weight]
    return len(operands) == 1 and (node.args[1:2] == (weight,) or node.kwargs.get("weight") is weight)


def _lean(node: fx.Node, gate: fx.Node) -> None:
    node.target, node.args = LEAN[op_name(node)], (gate, *node.args)
