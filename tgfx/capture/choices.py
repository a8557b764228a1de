"""Choices in a captured graph: which addition adds which alternative.

alternative(a(x), 0, 0) + alternative(b(x), 0, 1)   ->   a(x) + b(x), and operand 0 and 1 of the addition noted
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from tgfx.choice import Choice
from tgfx.choice_gate import ChoiceGate
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, source_line
from tgfx.ir.switches import Branch, Edge, SwitchGroup
from tgfx.ir.tree import named_modules


@dataclass(frozen=True)
class TakenGate:
    """The gate of a choice of our copy of the model, on its way into the gate bank."""

    path: str
    choice: Choice
    gate: ChoiceGate

    @property
    def name(self) -> str:
        return self.path or "choice"  # the model itself is one


def take_gates(model: nn.Module) -> list[TakenGate]:
    """Number the choices of `model` (our copy) and take their gates out."""
    taken: list[TakenGate] = []
    for path, choice in [(p, m) for p, m in named_modules(model) if isinstance(m, Choice)]:
        choice.number = len(taken)
        taken.append(TakenGate(path, choice, choice.gate))
        del choice.gate
    return taken


def lift_choices(source: Source, taken: list[TakenGate]) -> tuple[SwitchGroup, ...]:
    """The choices that the graph shows, with the marks taken out of it (it is our own).

    Choices that it does not show are in closed boxes: they get their gates back and decide by themselves, as before.
    """
    marks = _lift(source)
    also = _lift(source.training) if source.training is not None else {}
    names = [name for name, _ in source.module.named_parameters()]
    places = {node.name: node for node in source.module.graph.nodes}
    groups = []
    for number, own in enumerate(taken):
        if (number, 0) not in marks:
            own.choice.gate, own.choice.number = own.gate, None
            continue
        branches = []
        for index in range(len(own.choice.alternatives)):
            prefix = f"{own.path}.alternatives.{index}.".lstrip(".")
            edges = marks[number, index]
            place = Refusal("added", edges[0].node, "add", source_line(places[edges[0].node]))
            mine = tuple(name for name in names if name.startswith(prefix))
            branches.append(Branch(tuple(edges), mine, place, tuple(also.get((number, index), ()))))
        groups.append(SwitchGroup(own.name, "choice", tuple(branches)))
    return tuple(groups)


def _lift(source: Source) -> dict[tuple[int, int], list[Edge]]:
    """(choice, alternative) -> the operands that carry its value."""
    graph = source.module.graph
    marks = [n for n in graph.nodes if n.op == "call_function" and n.target is torch.ops.tgfx.alternative.default]
    found: dict[tuple[int, int], list[Edge]] = {}
    for mark in marks:
        value, number, index = mark.args
        edges = found.setdefault((int(number), int(index)), [])  # type: ignore[arg-type]
        edges.extend(edge for user in mark.users for edge in _edges(user, mark))
        mark.replace_all_uses_with(value, propagate_meta=False)  # type: ignore[arg-type]
        graph.erase_node(mark)
    if marks:
        graph.lint()
        source.module.recompile()
    return found


def _edges(user: fx.Node, value: fx.Node) -> list[Edge]:
    return [Edge(user.name, position) for position, arg in enumerate(user.args) if arg is value]
