"""The default rule: from the gradients of each step to gates that meet the budget.

It stays the paper's method: deterministic gates, moved by the gradient of task loss + budget. Two things differ from
plain descent on eq. 7. The gradient of a gate is the slope between its two states (tgfx.training.evidence) instead of
the derivative at one of them, and both terms are divided by what the gate costs. The budget's part is then the same
number for all gates, the multiplier λ, and the λ that meets the target can be solved for instead of tuned:

    w ← rise of the loss when closed / marginal cost − λ,      open where w > 0

Which alternative of a choice is better is no question of one threshold: there the optimizer descends on the task's loss
and eq. 7, whose gradient is added here, until the gates are to stand still. If the chosen alternatives leave no way to
meet the target, they change then (tgfx.training.alternatives).

Where the weights are frozen, closed gates may come back, a few at a time (tgfx.training.two_states).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tgfx.budget import Budget
from tgfx.choice_gate import ChoiceGate
from tgfx.errors import GranularityError, InputError
from tgfx.gated_check import check_gated, inside_compiled
from tgfx.rounding import checked_multiple
from tgfx.training.evidence import Evidence
from tgfx.training.exchange import NEAR, exchange
from tgfx.training.feasible import check_feasible, check_sign_decides
from tgfx.training.optimizer_watch import weakly
from tgfx.training.optimizers import all_frozen, scale_of, trained_gates
from tgfx.training.ranks import Ranks, check_sharding
from tgfx.training.sample_count import SampleCount
from tgfx.training.schedule import Schedule
from tgfx.training.selection import (
    Prices,
    all_open,
    best_closed,
    change_alternatives_,
    close_worst,
    fewest,
    land,
    protected,
)
from tgfx.training.stops import choose_at, stops_for
from tgfx.training.two_states import TwoStates
from tgfx.training.vectors import (
    drop_gate_gradients_,
    gate_gradients,
    gate_weights,
    held_slots,
    movable,
    set_gate_weights_,
)
from tgfx.training.watcher import StepWatcher

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

STEPS = 1000  # optimizer steps in which the budget is reached and settled, where nobody says how many there will be
UPDATES = 200  # times that gates are chosen anew, at most
SAMPLES = 32  # batch size to assume where it cannot be seen (a compiled model)
FLOOR = 0.02  # share of every group that stays open
ROUNDS = 8  # tries to balance several budgets at one update
NEAREST = 1e-3  # to the threshold, for a latent weight
GAIN = 8.0  # how strongly a budget that is more than met loses weight
SWAPS = 0.01  # share of the gates that may come back at one update, at first, where the weights are frozen
STALL = 50  # steps without any gradient after which to warn


class BudgetController(StepWatcher):
    """Watches optimizer steps and moves the gates after each; the optimizer's own step on the gates is undone.

    It needs no call in the training loop: it sees every step of an optimizer that holds the gates. `close()` ends it.
    """

    def __init__(
        self,
        gated: GatedModule,
        budget: Mapping[str, float],
        *,
        steps: int = STEPS,
        schedule: Schedule | None = None,
        floor: float = FLOOR,
        batch_size: int | None = None,
        weights_frozen: bool | None = None,
        round_to: int | None = None,
    ) -> None:
        """`gated` may be compiled: torch.compile(gated). Given the model itself, compiled batches cannot be counted.

        `batch_size`: samples in an optimizer step (of this process), 32 where they are neither given nor counted.
        `weights_frozen`: nothing but gates is trained; by default, if no weight asks for a gradient.
        `round_to`: groups open and close in steps, from one multiple of it to the next.
        """
        called, gated = gated, inside_compiled(gated)
        check_gated(gated, "has gates that a controller could move")
        if not hasattr(gated.facts, "coupling"):
            raise GranularityError(
                "this controller moves gates of channels, heads and layers",
                expected='a model gated with granularity="channel", "head" or "layer"',
                found='granularity="weight"',
                fix="gated.budget_loss(params=0.5), or tgfx.fit, makes the controller for single weights",
            )
        super().__init__(gated, budget, schedule or Schedule(steps))
        check_sign_decides(gated)
        if not 0 <= floor <= 1:
            raise InputError("floor is a share of each group", expected="0 to 1", found=repr(floor))
        self.floor = floor
        self.round_to = None if round_to is None else checked_multiple(round_to)
        self.check_budget(self.budget)
        check_sharding(gated)
        self.multiplier = 0.0
        self.batch_size = batch_size
        self.every = max(1, self.schedule.steps // UPDATES)
        device = next(iter(gated.gates.values())).weight.device
        self.weights_frozen = all_frozen(gated) if weights_frozen is None else weights_frozen
        memory = max(4.0, 0.05 * self.schedule.steps)
        size = gated.facts.coupling.slots
        self.evidence: Evidence | TwoStates = (
            TwoStates(size, device=device)
            if self.weights_frozen
            else Evidence(size, memory=min(memory, 200.0), device=device)
        )
        self._before = gate_weights(gated)
        self._found: tuple[Tensor | None, int] | None = None  # gradient and samples of a step's first closure call
        self._ranks = Ranks()
        self._probe: Tensor | None = None  # its gradient, summed up over a step's batches
        self._samples = SampleCount(trained_gates(gated))
        self._seen_forward = False
        self._silent = 0
        self._mixed = False
        self._pressure = {kind: 1.0 for kind in self.budget}
        opened, prices = torch.from_numpy(gated.open_slots()), Prices(gated)
        self._start = {kind: prices.ratio(kind, opened) for kind in self.budget}
        self.watch_steps()
        self._hooks.append(called.register_forward_hook(weakly(self, "_count_samples"), with_kwargs=True))

    def state_dict(self) -> dict[str, Any]:
        own = {"multiplier": self.multiplier, "pressure": dict(self._pressure)}
        return {**super().state_dict(), **own, "evidence": self.evidence.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_budget(state)
        self.evidence.load_state_dict(state["evidence"])  # or it is refused, and nothing has changed
        super().load_state_dict(state)
        self.multiplier, self._pressure = state["multiplier"], dict(state["pressure"])

    def check_budget(self, budget: Budget) -> None:
        check_feasible(self.gated, budget, self.floor, self.round_to)

    def land(self) -> None:
        """Meet the budget now, wherever the schedule is; gates stay there from then on."""
        set_gate_weights_(self.gated, self._chosen(dict(self.budget), exactly=True))
        self.taken = max(self.taken, math.ceil(self.schedule.hold * self.schedule.steps))
        self._unmet, self._landed = False, self.taken

    def asked(self, budget: Budget) -> None:
        self._mixed = not self.driving  # until then the loss that is handed out has a gradient
        super().asked(budget)

    # -- what happens at a step -----------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._before = gate_weights(self.gated)

    def before_update(self, optimizer: Optimizer) -> None:
        if self.phase != "hold" and not self._mixed:
            self._pull_choices(scale_of(optimizer))

    def before_closure(self) -> None:
        self._put_back()  # LBFGS and the like move, and ask again: for gradients at the gates that there are

    def after_closure(self, optimizer: Optimizer, first: bool) -> None:
        self.before_update(optimizer)
        if first:
            self._found = gate_gradients(self.gated), self._samples.total
        # what will be undone must not bend the direction that LBFGS searches in
        drop_gate_gradients_(self.gated, choices=self.phase == "hold")

    def _put_back(self) -> None:
        """Gates to where they were before the step; at the end choices stand still as well."""
        set_gate_weights_(self.gated, self._before, choices=self.phase == "hold")

    def _pull_choices(self, scale: float) -> None:
        """Add the gradient of eq. 7 to that of the choices, which is still `scale` times too large."""
        weights = [g.weight for g in self.gated.gates.values() if isinstance(g, ChoiceGate) and g.weight.requires_grad]
        if not weights:
            return
        with torch.enable_grad():
            distance = scale * self.gated._distance(self.budget)
            if not distance.requires_grad:
                return
            gradients = torch.autograd.grad(distance, weights, allow_unused=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and weight.grad is not None:
                weight.grad.add_(gradient)
            elif gradient is not None:
                weight.grad = gradient

    def end_step(self) -> None:
        self._put_back()  # the gradient was taken there, not where the optimizer went
        found, self._found = self._found or (gate_gradients(self.gated), self._samples.total), None
        self._samples.begin(trained_gates(self.gated))
        if self._mixed:  # this gradient holds the budget's own, which is no evidence
            self._mixed = False
        else:
            self._watch(*found)
        if self.taken and self.phase in ("close", "settle") and self.taken % self.every == 0:
            set_gate_weights_(self.gated, self._chosen(self.targets, exactly=False))
        entered = self.phase
        self.taken += 1
        if self.lands_now(entered):
            set_gate_weights_(self.gated, self._chosen(dict(self.budget), exactly=True))

    def _count_samples(self, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.gated.bank.training):
            return
        recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint around the model, in backward
        if recomputed and self._seen_forward:
            return
        if not recomputed:
            self._seen_forward = True
            self._ranks.look()
        self._samples.call(args, kwargs, output)

    def tell_samples(self, count: int) -> None:
        """Said by a loop that knows its batches: counts where the model's own calls cannot be seen (compiled)."""
        self._samples.tell(count)

    def take_probe(self, gradient: Tensor) -> None:
        """That of a probe of the curvature (tgfx.training.probed), for the step that is under way."""
        self._probe = gradient if self._probe is None else self._probe + gradient

    def _watch(self, gradient: Tensor | None, samples: int) -> None:
        probe, self._probe = self._probe, None
        ours = movable(self.gated)
        if not bool(ours.any()):
            return  # nothing but choices
        if isinstance(self.evidence, TwoStates):
            self.evidence.moved(self._opened())
        samples = self._ranks.total(self.gated, self.batch_size or samples or SAMPLES)
        told = [each for each in (gradient, probe) if each is not None]  # where two models agree, only a probe tells
        useful = (
            gradient is not None
            and any(bool(each[ours.to(each.device)].any()) for each in told)
            and self.evidence.update(gradient, samples, probe)
        )
        self._silent = 0 if useful else self._silent + 1
        if self._silent == STALL and trained_gates(self.gated):
            warnings.warn(
                f"no gradient has reached the gates for {STALL} steps: gates are closed blindly. Does the loss come "
                "from the gated model, in train mode, and is backward() called before the optimizer's step?",
                stacklevel=6,
            )

    def _chosen(self, targets: Mapping[str, float], *, exactly: bool) -> Tensor:
        """New latent weights: score minus λ."""
        gated, prices = self.gated, Prices(self.gated)
        opened = self._opened()
        rise = self.evidence.rise(opened)
        start = all_open(gated, opened.device)
        marginals = {kind: prices.marginal(kind, opened) for kind in targets}
        stops = stops_for(gated, targets, self.round_to)
        for _ in range(ROUNDS):
            price = torch.stack([self._pressure[kind] * marginals[kind] for kind in targets]).sum(0)
            scores = _kept_where_free(rise / price.clamp(min=1e-12), (price <= 0) & opened)
            if stops is None:
                candidates, ranked = start, scores
                if self.weights_frozen:
                    candidates = start & (opened | best_closed(scores, start & ~opened, self._swaps()))
                    ranked = scores.where(candidates, -math.inf)  # what stays closed fills no floor
                keep = protected(gated, ranked, self.floor)
                chosen, threshold = close_worst(prices, ranked, candidates, keep, targets)
            else:
                least = fewest(gated, prices, self.floor, stops, scores)
                if change_alternatives_(gated, prices, least, targets):
                    return self._chosen(targets, exactly=exactly)
                chosen, threshold = choose_at(gated, prices, scores, stops, targets, floor=self.floor, exactly=exactly)
            gaps = {kind: prices.ratio(kind, chosen) - target for kind, target in targets.items()}
            if len(gaps) == 1 or max(map(abs, gaps.values())) < NEAR:
                break
            self._balance(gaps)
        if change_alternatives_(gated, prices, chosen, targets):
            return self._chosen(targets, exactly=exactly)
        if exactly and stops is None:
            chosen = land(prices, chosen, scores, targets)
            floor = protected(gated, scores.where(chosen, -math.inf), self.floor)
            chosen = exchange(gated, prices, chosen, scores, floor, targets)
        self.multiplier = max(0.0, threshold) if math.isfinite(threshold) else 0.0
        return self._ranks.agree(gated, self._latent(scores, chosen))

    def _latent(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Gates that are held have no score, and must not be compared with."""
        held = held_slots(self.gated).to(scores.device)
        weights = torch.ones_like(scores)  # of held gates: they are not written
        if not bool(held.all()):
            weights[~held] = latent(scores[~held], chosen[~held], cells=cells(self.gated), near=shaped(self.gated))
        return weights

    def _opened(self) -> Tensor:
        return torch.from_numpy(self.gated.open_slots()).to(self.evidence.mean.device)

    def spares(self) -> Tensor:
        """Closed gates, by slot, that the way to the budget may still need: none may be removed from the model yet.

        Gates close until a target is met, so the last one may go too far by what it costs. Where that is much, a
        cheaper gate of the same or another group fills the rest. The best closed one of each such group is kept, but
        only where there is a rest to fill: as long as gates have yet to close, the last ones are there by `patience`.
        """
        opened, ours = torch.from_numpy(self.gated.open_slots()), movable(self.gated).cpu()
        spares = torch.zeros_like(opened)
        if self.phase == "hold" and not self._unmet:
            return spares
        prices, weights = Prices(self.gated), gate_weights(self.gated).cpu()
        if min(share - prices.ratio(kind, opened) for kind, share in self.budget.items()) <= NEAR:
            return spares
        dear = torch.stack([prices.marginal(kind, opened) for kind in self.budget]).amax(0) > NEAR
        for name in self.gated.gates:
            own = torch.from_numpy(self.gated.gate_slots(name))
            closed = own[~opened[own] & ours[own] & dear[own]]
            if len(closed):
                spares[closed[weights[closed].argmax()]] = True
        return spares

    def _swaps(self) -> int:
        """How many closed gates may open now: single moves are foretold well, many at once are not."""
        left = max(0.0, 1 - self.taken / max(1.0, self.schedule.hold * self.schedule.steps))
        return max(1, round(SWAPS * left * int(movable(self.gated).sum())))

    def _balance(self, gaps: Mapping[str, float]) -> None:
        """Several budgets: one that is more than met weighs less, so that the others need not overshoot it."""
        for kind, gap in gaps.items():
            self._pressure[kind] *= math.exp(GAIN * gap)
        most = max(self._pressure.values())
        self._pressure = {kind: max(value / most, 1e-6) for kind, value in self._pressure.items()}


def _kept_where_free(scores: Tensor, free: Tensor) -> Tensor:
    """The scores with open gates that cost nothing above all others: closing them would bring no budget nearer."""
    if not bool(free.any()) or bool(free.all()):
        return scores
    return scores.where(~free, scores[~free].max().clamp(min=0) + 1)


def latent(scores: Tensor, opened: Tensor, *, cells: float = 1e5, near: bool = False) -> Tensor:
    """Latent weights in the order of the scores, of size about 1, positive exactly where a gate is open.

    A closed gate hands its gradient on by the tiny value s(w) of its cell of width 1/M: a zero would not pass a relu.
    So at either limit a closed gate stands in the middle of a cell, and float32 can tell that from the cell's edge.
    near: no further from 0 than 2, for gates whose slope vanishes farther out.
    """
    centred = scores - (scores[opened].min() if bool(opened.any()) else scores.max())
    scale = centred.abs().median().clamp(min=1e-30)
    distance = centred.abs() / scale
    if near:
        distance = 2 * distance / (1 + distance)
    least, most = (math.floor(NEAREST * cells) + 0.5) / cells, (2**20 + 0.5) / cells
    return torch.where(opened, distance.clamp(min=NEAREST, max=1e3), -distance.clamp(min=least, max=most))


def shaped(gated: GatedModule) -> bool:
    """Whether any gate's slope depends on its latent weight."""
    return any(gate.settings.shape != "constant" for gate in gated.gates.values())


def cells(gated: GatedModule) -> float:
    """M of the gates, the finest where they differ."""
    return max((gate.settings.M for gate in gated.gates.values() if hasattr(gate, "settings")), default=1e5)
