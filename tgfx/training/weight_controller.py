"""The default rule for gates over single weights: descend, then shift all gates alike until the budget is met.

    w ← w − rate · gradient          the optimizer, on the task alone
    w ← w − λ · price                every few steps; the λ that meets the target is solved for

There are as many gates as weights, so nothing is kept per gate besides its latent weight: no evidence, no copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tgfx.errors import BudgetError
from tgfx.training.schedule import Schedule
from tgfx.training.watcher import StepWatcher

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

STEPS = 1000
UPDATES = 50  # a pass over all weights each
HALVINGS = 40
TIE_BREAK = 1e-3  # of a gate's size: gates that start alike are closed in the order of their weights' magnitudes


class WeightController(StepWatcher):
    """Keeps the gates of single weights at a target that falls from 1 to the budget; it sees every optimizer step."""

    def __init__(
        self,
        gated: WeightGatedModule,
        budget: Mapping[str, float],
        *,
        steps: int = STEPS,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(gated, budget, schedule or Schedule(steps))
        check_weight_budget(gated, self.budget)
        self.every = max(1, self.schedule.steps // UPDATES)
        self._start = {kind: gated.ratio(kind).item() for kind in self.budget}
        self.watch_steps()

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if self.holds_gates(optimizer) and self.phase == "hold":
            for gate in self.gated.gates.values():
                gate.weight.grad = None  # an optimizer leaves alone what has no gradient

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if not self.holds_gates(optimizer):
            return
        if not self.taken:
            break_ties_(self.gated)
        elif self.phase in ("close", "settle") and self.taken % self.every == 0:
            shift_to_(self.gated, self.targets)
        entered = self.phase
        self.taken += 1
        if self.phase == "hold" and entered != "hold":
            shift_to_(self.gated, dict(self.budget))


def check_weight_budget(gated: WeightGatedModule, budget: Mapping[str, float]) -> None:
    """Refuse a budget below what has no gate."""
    for kind, share in budget.items():
        least = gated.cheapest(kind)
        if share < least:
            raise BudgetError(
                f"budget {kind}={share:g} cannot be met: what has no gate costs more",
                expected=f"{kind} of at least {least:.4f}",
                found=f"{share:g}",
                fix=f"ask for {kind}={math.ceil(least * 1000) / 1000:g} or more, or gate more of the model",
            )


@torch.no_grad()
def break_ties_(gated: WeightGatedModule) -> None:
    """Gates that were made alike would all close at once."""
    for name, gate in gated.gates.items():
        magnitude = gated.get_parameter(name).detach().abs()
        gate.weight.add_(magnitude / magnitude.max().clamp(min=1e-12), alpha=TIE_BREAK)


@torch.no_grad()
def shift_to_(gated: WeightGatedModule, targets: Mapping[str, float]) -> None:
    """Move all gates by λ times their price, so that every target is met and the nearest is used up.

    Found by halving: each try is a pass over the weights, and none takes memory of its own beyond one weight's mask.
    """
    gates = gated.gates
    prices = {kind: _prices(gated, kind) for kind in targets}
    price = {name: reduce(torch.add, [one[name] for one in prices.values()]) / len(prices) for name in gates}

    def met(shift: float) -> bool:
        for kind, target in targets.items():
            cost = gated.facts.cost.fixed[kind]
            for name, gate in gates.items():
                factor = gated.facts.cost.factors[kind][name].to(gate.weight.device)
                opened = gate.weight > shift * price[name]
                cost += float(opened.sum() * factor) if factor.numel() == 1 else float((opened * factor).sum())
            if cost > target * gated.total(kind):
                return False
        return True

    low, high = _bounds(gates, price)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if met(middle) else (middle, high)
    for name, gate in gates.items():
        gate.weight.sub_(high * price[name])


def _prices(gated: WeightGatedModule, kind: str) -> dict[str, Tensor]:
    """Cost per entry, 1 on average over the model."""
    factors = gated.facts.cost.factors[kind]
    gates = gated.gates
    entries = sum(gate.weight.numel() for gate in gates.values())
    whole = sum(float(factors[name].expand(gate.weight.shape).double().sum()) for name, gate in gates.items())
    return {name: factors[name].to(gate.weight) * (entries / max(whole, 1e-12)) for name, gate in gates.items()}


def _bounds(gates: Mapping[str, Any], price: Mapping[str, Tensor]) -> tuple[float, float]:
    """Shifts that close nothing and everything."""
    low, high = math.inf, -math.inf
    for name, gate in gates.items():
        least, most = float(price[name].min()), float(price[name].max())
        weight_low, weight_high = float(gate.weight.min()), float(gate.weight.max())
        low = min(low, weight_low / (most if weight_low > 0 else max(least, 1e-12)))
        high = max(high, weight_high / (max(least, 1e-12) if weight_high > 0 else most))
    return low - 1e-6, high + 1e-6
