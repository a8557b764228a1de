"""The default rule for gates over single weights: rank all by what closing them costs, and close the cheapest.

    w ← √(rise of the loss when closed / price) − λ,      open where w > 0

every few steps, with the λ that meets the target. It is the rule for channels (tgfx.training.controller), with evidence
that takes next to no memory (tgfx.training.weight_evidence): there are as many gates as weights, so where weights are
trained along nothing is kept per gate besides its latent weight. The optimizer's own step on the gates does not take
place.

Where the weights are frozen, the choice of gates is all that is learned, and one number per gate is kept for that: the
slopes that it met (tgfx.training.weight_slopes), which are taken off the rise; the root then has the sign of what is
left. Gates that were closed may come back so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from tgfx.budget import Budget
from tgfx.errors import InputError
from tgfx.gated_check import check_gated
from tgfx.sharding import is_sharded
from tgfx.training.feasible import check_sign_decides
from tgfx.training.gradient_mark import GradientMark
from tgfx.training.optimizer_watch import weakly
from tgfx.training.optimizers import all_frozen, scale_of, trained_gates
from tgfx.training.ranks import check_sharding
from tgfx.training.schedule import Schedule
from tgfx.training.watcher import StepWatcher
from tgfx.training.weight_evidence import WeightEvidence
from tgfx.training.weight_landing import check_weight_budget, shift_to_
from tgfx.training.weight_slopes import SlopeEvidence, memory_of, rate_of
from tgfx.training.weight_worth import worth_at_threshold

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

STEPS = 1000
UPDATES = 50  # a pass over all weights each
FLOOR = 0.001  # share of every weight that stays open: few, since sparse layers are what is wanted, but never none
STALL = 50  # steps without any gradient after which to warn


class WeightController(StepWatcher):
    """Keeps the gates of single weights at a target that falls from 1 to the budget; it sees every optimizer step.

    Where weights are trained along, the gradient of a weight's gates is looked at as soon as backward has made it, and
    freed: at no time is there more than one, and a mark on the smallest (tgfx.training.gradient_mark). (Not with
    torch.distributed, which has yet to average it over the ranks. And a GradScaler wants gates and weights in one
    optimizer: it refuses to step one that has no gradient at all.)
    """

    def __init__(
        self,
        gated: WeightGatedModule,
        budget: Mapping[str, float],
        *,
        steps: int = STEPS,
        schedule: Schedule | None = None,
        floor: float = FLOOR,
        weights_frozen: bool | None = None,
    ) -> None:
        """`weights_frozen`: nothing but gates is trained; by default, if no weight asks for a gradient."""
        check_gated(gated, "has gates that a controller could move")
        super().__init__(gated, budget, schedule or Schedule(steps))
        check_sign_decides(gated)
        if not 0 <= floor <= 1:
            raise InputError("floor is a share of each weight", expected="0 to 1", found=repr(floor))
        self.floor = floor
        self.check_budget(self.budget)
        check_sharding(gated)
        _refuse_shards(gated)
        self.every = max(1, self.schedule.steps // UPDATES)
        self._start = {kind: gated.ratio(kind).item() for kind in self.budget}
        self._mixed = False
        self._learned = False  # in this step
        self._silent = 0
        self.weights_frozen = all_frozen(gated) if weights_frozen is None else weights_frozen
        self.evidence = {name: self._evidence_for(gate.weight) for name, gate in gated.gates.items()}
        self.watch_steps()
        self._watch_backward()

    def _evidence_for(self, latent: Tensor) -> WeightEvidence:
        steps = self.schedule.steps
        if self.weights_frozen and latent.requires_grad:  # a gate that is held has no slopes
            return SlopeEvidence(latent.shape, memory=memory_of(steps), device=latent.device)
        return WeightEvidence(latent.shape, memory=min(max(4.0, 0.05 * steps), 200.0), device=latent.device)

    def _watch_backward(self) -> None:
        self._names = {id(gate.weight): name for name, gate in self.gated.gates.items()}
        self._backward = -1  # number of the last that was seen
        seen, latents = weakly(self, "_after_backward"), trained_gates(self.gated)
        self._hooks += [latent.register_post_accumulate_grad_hook(seen) for latent in latents]
        smallest = min(latents, key=lambda latent: latent.numel(), default=None)
        self._mark = None if smallest is None else GradientMark(smallest)
        if smallest is not None:
            self._hooks.append(smallest.register_hook(weakly(self, "_before_accumulation")))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "evidence": {name: own.state_dict() for name, own in self.evidence.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_budget(state)
        for name, own in self.evidence.items():
            own.check(state["evidence"].get(name, {}), name)
        super().load_state_dict(state)
        for name, own in self.evidence.items():
            own.load_state_dict(state["evidence"][name])

    def land(self) -> None:
        """Meet the budget now, wherever the schedule is; gates stay there from then on."""
        self._choose(dict(self.budget))
        self.taken = max(self.taken, math.ceil(self.schedule.hold * self.schedule.steps))

    def check_budget(self, budget: Budget) -> None:
        check_weight_budget(self.gated, budget, self.floor)

    def asked(self, budget: Budget) -> None:
        self._mixed = not self.driving  # until then the loss that is handed out has a gradient
        super().asked(budget)

    # -- what happens at a step -----------------------------------------------------------------------------

    @property
    def _frees(self) -> bool:
        return not self.weights_frozen and not (distributed.is_available() and distributed.is_initialized())

    def _before_accumulation(self, gradient: Tensor) -> None:
        """The gates that bear the mark get a gradient of their own, which must not be added to it."""
        self._enter_backward()
        if self._mark is not None:
            self._mark.clear()

    def _after_backward(self, latent: Tensor) -> None:
        if self._frees:
            self._enter_backward()
            self._take(self._names[id(latent)])
            if self._learning and self._mark is not None:
                self._mark.put()
        elif self._mixed and latent.grad is not None:
            latent.grad.zero_()  # it tells nothing, and if it is of a step that has begun, that step would use it
            self._zeroed = True

    def _enter_backward(self) -> None:
        """What earlier ones have left counts, unless it was thrown away."""
        number = torch._C._current_graph_task_id()
        if number != self._backward and self._mark is not None and self._mark.lost:
            self._mark.clear()
            self._forget()
        self._backward = number

    def _forget(self) -> None:
        for own in self.evidence.values():
            own.forget()

    @property
    def _learning(self) -> bool:
        """Once a step; not where gates stand still at their budget, nor from a gradient that holds the budget's own."""
        return (self.phase != "hold" or self._unmet) and not self._mixed and not self._learned

    def _take(self, name: str) -> None:
        """What the gradient of a weight's gates tells; then it goes: an optimizer leaves alone what has none."""
        gate = self.gated.gates[name]
        if self._learning:
            self.evidence[name].take(self.gated.get_parameter(name), gate.weight, gate.settings)
        gate.weight.grad = None

    def begin_step(self) -> None:
        _refuse_shards(self.gated)
        self._learned = False

    def before_update(self, optimizer: Optimizer) -> None:
        factor = 1.0 if self._mark is None else self._mark.lift()
        if not factor:
            self._forget()
        for name in self.evidence:
            self._take(name)
        if self._learning:
            self._learn(factor / scale_of(optimizer))
        self._mixed, self._zeroed, self._learned = False, False, True

    def before_closure(self) -> None:
        """No gate has a gradient when the optimizer moves, so all are where they were."""

    def after_closure(self, optimizer: Optimizer, first: bool) -> None:
        self.before_update(optimizer)  # of a second call nothing is learned

    def _learn(self, factor: float) -> None:
        useful = [own.learn(factor) for own in self.evidence.values()]
        self._silent = 0 if any(useful) else self._silent + 1
        if self._silent == STALL:
            warnings.warn(
                f"no gradient has reached the gates for {STALL} steps: gates are closed by the size of their weights. "
                "Does the loss come from the gated model, in train mode, and is backward() called before the "
                "optimizer's step?",
                stacklevel=6,
            )

    def end_step(self) -> None:
        self._learned = False
        if self.taken and self.phase in ("close", "settle") and self.taken % self.every == 0:
            self._choose(self.targets)
        entered = self.phase
        self.taken += 1
        if self.lands_now(entered):
            self._choose(dict(self.budget))

    @torch.no_grad()
    def _choose(self, targets: Mapping[str, float]) -> None:
        """New latent weights: score minus λ, in units of λ, so that a gate that is worth nothing stands at -1."""
        gated = self.gated
        gates = {name: gate for name, gate in gated.gates.items() if gate.weight.requires_grad}
        if not gates:
            return
        prices = {kind: _prices(gated, kind) for kind in targets}
        scales = {
            name: 1 / (reduce(torch.add, [one[name] for one in prices.values()]) / len(prices)).clamp(min=1e-12)
            for name in gates
        }
        if self.weights_frozen:
            self._set_rates(scales, targets)
        for name, gate in gates.items():
            self.evidence[name].write_(gate.weight, gated.get_parameter(name), scales[name])
        most = max(float(gate.weight.max()) for gate in gates.values())
        for gate in gates.values():
            gate.weight.div_(most if most > 0 else 1.0)
        multiplier = shift_to_(gated, targets, self.floor)
        if multiplier > 0:
            for gate in gates.values():
                gate.weight.div_(multiplier)

    def _set_rates(self, scales: Mapping[str, Tensor], targets: Mapping[str, float]) -> None:
        """How far slopes move a gate, from what is at stake at the threshold."""
        rate = rate_of(worth_at_threshold(self.gated, self.evidence, scales, targets), self.schedule.steps)
        for own in self.evidence.values():
            if isinstance(own, SlopeEvidence):
                own.rate = rate


def _refuse_shards(gated: WeightGatedModule) -> None:
    sharded = next((name for name, p in gated.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise InputError(
            "gates over single weights are ranked over whole weights, and these are sharded over ranks",
            expected="a gated model that is not sharded",
            found=f"{sharded} as a DTensor",
            fix='use DistributedDataParallel, or granularity="channel", which can be sharded',
        )


def _prices(gated: WeightGatedModule, kind: str) -> dict[str, Tensor]:
    """Cost per entry, 1 on average over the model."""
    cost = gated.facts.cost
    entries = sum(shape.numel() for shape in cost.shapes.values())
    whole = sum(cost.whole(kind, name) for name in cost.shapes)
    return {
        name: cost.factors[kind][name].to(gate.weight.device) * (entries / max(whole, 1e-12))
        for name, gate in gated.gates.items()
    }
