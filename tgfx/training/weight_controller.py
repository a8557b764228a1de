"""The default rule for gates over single weights: rank all by what closing them costs, and close the cheapest.

    w ← √(rise of the loss when closed / price) − λ,      open where w > 0

every few steps, with the λ that meets the target. It is the rule for channels (tgfx.training.controller), with evidence
that takes next to no memory (tgfx.training.weight_evidence): there are as many gates as weights, so nothing is kept per
gate besides its latent weight. The optimizer's own step on the gates does not take place.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.gated_check import check_gated
from tgfx.training.controller import check_sign_decides, more_gates
from tgfx.training.schedule import Schedule
from tgfx.training.watcher import StepWatcher
from tgfx.training.weight_evidence import WeightEvidence

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

STEPS = 1000
UPDATES = 50  # a pass over all weights each
HALVINGS = 33  # enough to tell any two numbers in float32 apart


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
        check_gated(gated, "has gates that a controller could move")
        super().__init__(gated, budget, schedule or Schedule(steps))
        check_sign_decides(gated)
        self.check_budget(self.budget)
        self.every = max(1, self.schedule.steps // UPDATES)
        self._start = {kind: gated.ratio(kind).item() for kind in self.budget}
        self._mixed = False
        memory = min(max(4.0, 0.05 * self.schedule.steps), 200.0)
        self.evidence = {
            name: WeightEvidence(gate.weight.shape, memory=memory, device=gate.weight.device)
            for name, gate in gated.gates.items()
        }
        self.watch_steps()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "evidence": {name: own.state_dict() for name, own in self.evidence.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_budget(state)
        for name, own in self.evidence.items():
            own.check(state["evidence"].get(name, {}), name)
        super().load_state_dict(state)
        for name, own in self.evidence.items():
            own.load_state_dict(state["evidence"][name])

    def check_budget(self, budget: Budget) -> None:
        check_weight_budget(self.gated, budget)

    def asked(self, budget: Budget) -> None:
        self._mixed = not self.driving  # until then the loss that is handed out has a gradient
        super().asked(budget)

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if not self.holds_gates(optimizer):
            return
        for name, gate in self.gated.gates.items():
            if (self.phase != "hold" or self._unmet) and not self._mixed:
                self.evidence[name].update(self.gated.get_parameter(name), gate.weight, gate.settings)
            gate.weight.grad = None  # an optimizer leaves alone what has no gradient
        self._mixed = False

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if not self.holds_gates(optimizer):
            return
        if self.taken and self.phase in ("close", "settle") and self.taken % self.every == 0:
            self._choose(self.targets)
        entered = self.phase
        self.taken += 1
        if self.lands_now(entered):
            self._choose(dict(self.budget))

    @torch.no_grad()
    def _choose(self, targets: Mapping[str, float]) -> None:
        """New latent weights: score minus λ, in units of λ, so that a gate far from being open stands at -1."""
        gated = self.gated
        gates = {name: gate for name, gate in gated.gates.items() if gate.weight.requires_grad}
        if not gates:
            return
        prices = {kind: _prices(gated, kind) for kind in targets}
        for name, gate in gates.items():
            price = reduce(torch.add, [one[name] for one in prices.values()]) / len(prices)
            self.evidence[name].write_(gate.weight, gated.get_parameter(name), 1 / price.clamp(min=1e-12))
        largest = max(float(gate.weight.max()) for gate in gates.values())
        for gate in gates.values():
            gate.weight.div_(largest if largest > 0 else 1.0)
        multiplier = shift_to_(gated, targets)
        if multiplier > 0:
            for gate in gates.values():
                gate.weight.div_(multiplier)


def check_weight_budget(gated: WeightGatedModule, budget: Mapping[str, float]) -> None:
    """Refuse a budget below what has no gate."""
    for kind, share in budget.items():
        least = gated.cheapest(kind)
        if share < least:
            raise BudgetError(
                f"budget {kind}={share:g} cannot be met: what has no gate costs more",
                expected=f"{kind} of at least {least:.4f}",
                found=f"{share:g}",
                fix=f"ask for {kind}={math.ceil(least * 1000) / 1000:g} or more, or {more_gates(gated)}",
            )


@torch.no_grad()
def shift_to_(gated: WeightGatedModule, targets: Mapping[str, float]) -> float:
    """Move all gates alike, so that every target is met and the nearest is used up; by how much they were moved.

    Found by halving: each try is a pass over the weights, and none takes memory of its own beyond one weight's mask.
    """
    gates, cost = {n: gate for n, gate in gated.gates.items() if gate.weight.requires_grad}, gated.facts.cost
    if not gates:
        return 0.0
    fixed = {kind: gated.fixed_cost(kind) for kind in targets}

    def met(shift: float) -> bool:
        for kind, target in targets.items():
            found = fixed[kind]
            for name, gate in gates.items():
                factor = cost.factors[kind][name].to(gate.weight.device)
                opened = gate.weight > shift
                found += float(opened.sum() * factor) if factor.numel() == 1 else float((opened * factor).sum())
            if found > target * gated.total(kind):
                return False
        return True

    # halved by rank among the numbers of float32, not by size: what gates cost spans many orders of magnitude
    low = _rank(min(float(gate.weight.min()) for gate in gates.values())) - 1
    high = _rank(max(float(gate.weight.max()) for gate in gates.values())) + 1
    for _ in range(HALVINGS):
        if high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if met(_ranked(middle)) else (middle, high)
    for gate in gates.values():
        gate.weight.sub_(_ranked(high))
    return _ranked(high)


def _rank(number: float) -> int:
    """Place of a number among all of float32: the bits of a positive one, read as a whole number, keep the order."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _ranked(rank: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<i", abs(rank)))
    return number if rank >= 0 else -number


def _prices(gated: WeightGatedModule, kind: str) -> dict[str, Tensor]:
    """Cost per entry, 1 on average over the model."""
    cost = gated.facts.cost
    entries = sum(shape.numel() for shape in cost.shapes.values())
    whole = sum(cost.whole(kind, name) for name in cost.shapes)
    return {
        name: cost.factors[kind][name].to(gate.weight.device) * (entries / max(whole, 1e-12))
        for name, gate in gated.gates.items()
    }
