"""A model with a gate for every weight entry: the same questions as to any gated model, answered per weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.gated import GatedModule
from tgfx.ir.facts import Axis
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source
from tgfx.ops.weight_gate import weighted_sum
from tgfx.passes.couple import Group, Groups
from tgfx.passes.weight_cost import WEIGHT_KINDS, WeightCost
from tgfx.passes.weight_uses import WeightUses
from tgfx.rounding import refuse_rounding
from tgfx.training.weight_controller import WeightController
from tgfx.training.weight_landing import check_weight_budget
from tgfx.weight.gate import WeightGate
from tgfx.weight.report import WeightReport, explain_weight


@dataclass
class WeightFacts:
    """What the passes found out about weights, kept with the gated model."""

    source: Source
    uses: WeightUses
    kept: dict[str, Refusal]  # parameters without a gate, and why
    cost: WeightCost
    model_name: str
    ignored: tuple[str, ...] = ()


class WeightGatedModule(GatedModule):
    """Runs like the model it was made from; `tgfx.shrink` sets the weights whose gates are closed to zero."""

    facts: WeightFacts

    @property
    def gates(self) -> dict[str, WeightGate]:  # type: ignore[override]
        """Name of a weight -> its gates, in its shape."""
        return self.bank.gates()  # type: ignore[return-value]

    @property
    def groups(self) -> Groups:
        """A Group per parameter; the ones without gates (with their reason) come last."""
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        names, start = _all_names(self), 0
        groups = []
        for name in self.facts.cost.shapes:
            groups.append(_group(names[name], shapes[name], None, start))
            start += groups[-1].size
        frozen = [_group(names[name], shapes[name], why, -1) for name, why in self.facts.kept.items()]
        return Groups((*groups, *frozen))

    def explain(self, name: str) -> str:
        """Readable text about a layer's or a parameter's gates."""
        return explain_weight(self, name)

    def report(self) -> WeightReport:
        """A table of all weights; print it."""
        return WeightReport(self)

    def cost(self, kind: str = "flops") -> Tensor:
        """What the model costs with the gates as they are (0-dim, differentiable in training mode).

        params: parameters that are not closed; flops: 2 * multiply-adds with weights that are not closed, per sample,
        in convolutions and fully-connected layers; flops_all adds products without a weight (attention).
        """
        cost, factors = self.facts.cost, self.facts.cost.factors[_known(kind)]
        gates = self.gates
        device = next(iter(gates.values())).weight.device
        total = torch.tensor(cost.fixed[kind], dtype=torch.float64, device=device)
        for name, gate in gates.items():
            total = total + gate.open_sum(factors[name].to(gate.weight.device)).to(device)
        return total

    def total(self, kind: str = "flops") -> float:
        """The cost with all gates open."""
        return self.facts.cost.total(_known(kind))

    def ratio(self, kind: str = "flops") -> Tensor:
        return self.cost(kind) / self.total(kind)

    def cost_expr(self, kind: str = "flops") -> sympy.Expr:
        """The cost as a sum over n[weight], the number of open gates of each weight."""
        return self.facts.cost.expression(_known(kind))

    def marginal(self, kind: str = "flops") -> dict[str, Tensor]:
        """Per weight: how much the cost changes with each of its gates (in its shape, without taking its memory)."""
        cost = self.facts.cost
        return {name: factor.expand(cost.shapes[name]) for name, factor in cost.factors[_known(kind)].items()}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of cost that this model has."""
        return WEIGHT_KINDS

    def _check_feasible(self, budget: Budget) -> None:
        check_weight_budget(self, budget)

    def _new_controller(self, budget: Budget, steps: int | None, round_to: int | None) -> WeightController:
        refuse_rounding(round_to)
        return WeightController(self, budget, **({} if steps is None else {"steps": steps}))

    def _distance(self, budget: Budget) -> Tensor:
        first = next(iter(self.gates.values())).weight
        loss = torch.zeros((), device=first.device)
        for kind, rho in budget.items():
            loss = loss + (rho - self.ratio(kind).float()) ** 2
        return loss

    def _for_the_log(self, distance: Tensor) -> Tensor:
        return distance.detach()  # no gradient at all, which would take memory for each weight

    def cheapest(self, kind: str = "flops") -> float:
        """The smallest ratio that can be reached: all gates closed but those that are held (ask for no gradient)."""
        return self.fixed_cost(kind) / self.total(kind)

    def fixed_cost(self, kind: str) -> float:
        """Of what has no gate, and of what a gate that is held leaves open."""
        fixed = self.facts.cost.fixed[_known(kind)]
        for name, gate in self.gates.items():
            if not gate.weight.requires_grad:
                factor = self.facts.cost.factors[kind][name].to(gate.weight.device)
                fixed += float(weighted_sum(gate.weight.detach(), gate.settings.binary_value, factor))
        return fixed


def _all_names(gated: GatedModule) -> dict[str, tuple[str, ...]]:
    """First name of every parameter of the model -> all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in gated.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {own[0]: tuple(own) for own in names.values()}


def _group(names: tuple[str, ...], shape: torch.Size, frozen: Refusal | None, start: int) -> Group:
    members = tuple(Axis("param", name, axis) for name in names for axis in range(len(shape)))
    return Group(names[0], shape.numel(), members, (), frozen, np.zeros(0, dtype=np.int64), start)


def _known(kind: Any) -> str:
    if kind == "channels":
        raise BudgetError(
            "channels are not counted where single weights are gated",
            expected=", ".join(WEIGHT_KINDS),
            found="'channels'",
            fix='use params, or tgfx.transform(model, granularity="channel")',
        )
    if kind not in WEIGHT_KINDS:
        raise BudgetError(f"unknown cost kind {kind!r}", expected=", ".join(WEIGHT_KINDS), found=repr(kind))
    return kind


__all__ = ["WeightFacts", "WeightGatedModule"]
