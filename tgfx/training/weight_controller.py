"""The default rule for gates over single weights: descend, then shift all gates alike until the budget is met.

    w ← w − rate · gradient          the optimizer, on the task alone
    w ← w − λ · price                every few steps; the λ that meets the target is solved for

There are as many gates as weights, so nothing is kept per gate besides its latent weight: no evidence, no copies.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.training.hooks import weakly
from tgfx.training.optimizers import not_held
from tgfx.training.schedule import Phase, Schedule

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

STEPS = 1000
UPDATES = 50  # a pass over all weights each
HALVINGS = 40
TIE_BREAK = 1e-3  # of a gate's size: gates that start alike are closed in the order of their weights' magnitudes


class WeightController:
    """Keeps the gates of single weights at a target that falls from 1 to the budget; it sees every optimizer step."""

    def __init__(
        self,
        gated: WeightGatedModule,
        budget: Mapping[str, float],
        *,
        steps: int = STEPS,
        schedule: Schedule | None = None,
    ) -> None:
        self.budget = Budget.of(budget)
        self.schedule = schedule or Schedule(steps)
        check_weight_budget(gated, self.budget)
        self.taken = 0
        self.every = max(1, self.schedule.steps // UPDATES)
        self._gated = weakref.ref(gated)
        self._weights_only = self._asked = 0
        self._start = {kind: gated.ratio(kind).item() for kind in self.budget}
        self._hooks = [
            register_optimizer_step_pre_hook(weakly(self, "before_step")),
            register_optimizer_step_post_hook(weakly(self, "after_step")),
        ]

    @property
    def gated(self) -> WeightGatedModule:
        gated = self._gated()
        if gated is None:
            raise ReferenceError("the gated model is gone")
        return gated

    @property
    def phase(self) -> Phase:
        return self.schedule.phase(self.taken)

    @property
    def driving(self) -> bool:
        return self.taken > 0

    @property
    def closed(self) -> bool:
        return not self._hooks

    @property
    def targets(self) -> dict[str, float]:
        return {k: self.schedule.target(self.taken, share, self._start[k]) for k, share in self.budget.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"budget": dict(self.budget), "taken": self.taken, "start": dict(self._start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["budget"] != dict(self.budget):
            raise BudgetError(
                "the saved state is for another budget", expected=str(self.budget), found=str(state["budget"])
            )
        self.taken, self._start = state["taken"], dict(state["start"])

    def close(self) -> None:
        """Stop watching; the gates stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def asked(self) -> None:
        """A loss was asked for. An optimizer that steps in between and never holds the gates is a mistake."""
        self._asked += 1
        if self._asked > 3 and self._weights_only > 2 and not self.driving:
            held = {id(gate.weight) for gate in self.gated.gates.values()}
            raise not_held(self.gated, [n for n, p in self.gated.named_parameters() if id(p) in held])

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if not self._holds_gates(optimizer):
            self._weights_only += 1
        elif self.phase == "hold":
            for gate in self.gated.gates.values():
                gate.weight.grad = None  # an optimizer leaves alone what has no gradient

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if not self._holds_gates(optimizer):
            return
        self._weights_only = self._asked = 0
        if not self.taken:
            break_ties_(self.gated)
        elif self.phase in ("close", "settle") and self.taken % self.every == 0:
            shift_to_(self.gated, self.targets)
        entered = self.phase
        self.taken += 1
        if self.phase == "hold" and entered != "hold":
            shift_to_(self.gated, dict(self.budget))

    def _holds_gates(self, optimizer: Optimizer) -> bool:
        gate = next(iter(self.gated.gates.values())).weight
        return any(p is gate for group in optimizer.param_groups for p in group["params"])


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
