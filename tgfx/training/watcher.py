"""What every controller does: count the steps of the optimizer that holds the gates, and know the target of each."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.sharding import is_sharded
from tgfx.training.closures import Arguments, around_closure, has_closure
from tgfx.training.no_step import trains_nothing
from tgfx.training.optimizer_watch import OptimizerWatch
from tgfx.training.optimizers import check_gates_together, trained_gates
from tgfx.training.schedule import Phase, Schedule

UNSEEN = 50  # losses asked for without a step in between, after which to look whether someone else trains the model


class StepWatcher(OptimizerWatch):
    """Counts the steps, knows the target of each, and ends with `close()`. Subclasses move the gates."""

    every: int  # steps between two choices of gates
    batch_size: int | None = None  # samples in an optimizer step, where they cannot be counted
    round_to: int | None = None  # sizes of groups are multiples of it

    def __init__(self, gated: Any, budget: Mapping[str, float], schedule: Schedule) -> None:
        super().__init__(gated, budget)
        self.schedule = schedule
        self.taken = 0
        self._stepping = True  # if it is made in the closure of a step, it sees only that step's end
        self._start: dict[str, float] = dict.fromkeys(self.budget, 1.0)
        self._unmet = False  # a new share that the gates, which stand still, do not follow yet
        self._landed = 0  # step at which they were last brought to the budget
        self._zeroed = False  # the gradients of this step, by the controller itself
        self._at_first: list[tuple[Tensor, Tensor]] | None = None
        self._warned = False

    @property
    def phase(self) -> Phase:
        return self.schedule.phase(self.taken)

    @property
    def driving(self) -> bool:
        """Whether a step has been seen, so that gates are moved here and not by the optimizer."""
        return self.taken > 0

    @property
    def steps_seen(self) -> bool:
        return self.driving

    @property
    def targets(self) -> dict[str, float]:
        """What the ratios should be now, on the way from where the model was to the budget."""
        return {k: self.schedule.target(self.taken, share, self._start[k]) for k, share in self.budget.items()}

    # -- what happens at a step -----------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> Arguments | None:
        check_gates_together(self.gated, optimizer)
        if not self.holds_gates(optimizer):
            return None
        by_closure = has_closure(args, kwargs)
        self._stepping = by_closure or not trains_nothing(optimizer, zeroed=self._zeroed)
        if not self._stepping:
            return None
        self.begin_step()
        if not by_closure:
            self.before_update(optimizer)
            return None
        return around_closure(args, kwargs, self.before_closure, lambda first: self.after_closure(optimizer, first))

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if self._stepping and self.holds_gates(optimizer):
            self._stepping = False
            self.end_step()

    @abstractmethod
    def begin_step(self) -> None:
        """A step that counts begins."""

    @abstractmethod
    def before_update(self, optimizer: Optimizer) -> None:
        """The gradients are there, and the optimizer is about to use them."""

    @abstractmethod
    def before_closure(self) -> None:
        """Gradients will be made inside of the step, perhaps not for the first time."""

    @abstractmethod
    def after_closure(self, optimizer: Optimizer, first: bool) -> None:
        """They are there, and the optimizer is about to use them."""

    @abstractmethod
    def end_step(self) -> None:
        """The optimizer has made its step: move the gates, and count it."""

    # -- the budget -----------------------------------------------------------------------------------------

    @abstractmethod
    def check_budget(self, budget: Budget) -> None:
        """Raise BudgetError if no assignment of the gates meets it."""

    def retarget(self, budget: Budget) -> None:
        """Evidence and the place in the schedule stay; gates that stood still are brought to the new shares."""
        self.check_budget(budget)
        self.budget, self._unmet = budget, True

    def lands_now(self, entered: Phase) -> bool:
        """After a step that began in the phase `entered`: whether gates are now to be brought to the budget itself.

        Once, as they come to a stand; after that if the budget has changed, and not more often than gates are chosen.
        """
        if self.phase != "hold":
            return False
        due = entered != "hold" or (self._unmet and self.taken - self._landed >= self.every)
        if due:
            self._unmet, self._landed = False, self.taken
        return due

    def state_dict(self) -> dict[str, Any]:
        own = {"budget": dict(self.budget), "taken": self.taken, "start": dict(self._start)}
        return {**own, "unmet": self._unmet, "landed": self._landed}

    def check_same_budget(self, state: dict[str, Any]) -> None:
        if state["budget"] != dict(self.budget):
            raise BudgetError(
                "the saved state is for another budget", expected=str(self.budget), found=str(state["budget"])
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_same_budget(state)
        self.taken, self._start = state["taken"], dict(state["start"])
        self._unmet, self._landed = state.get("unmet", False), state.get("landed", 0)  # older states name neither

    def asked(self, budget: Budget) -> None:
        super().asked(budget)
        if not self.driving and not self._warned:
            self._look_for_other_hands()

    def _look_for_other_hands(self) -> None:
        """Weights that change and no step seen: they are moved without a torch optimizer, so gates never would be."""
        if self._at_first is None:
            self._at_first = [(p, _local(p).clone()) for p in self._samples_of_weights()]
        elif self._asked % UNSEEN == 0 and any(not torch.equal(_local(p), before) for p, before in self._at_first):
            self._warned = True
            warnings.warn(
                f"weights have changed, and in {UNSEEN} calls of budget_loss no step of a torch.optim.Optimizer was "
                "seen that holds the gates: no gate will be closed. Gates are moved after such a step; with updates of "
                "your own, use budget_loss(weight=...) or wrap them in a torch.optim.Optimizer",
                stacklevel=6,
            )

    def _samples_of_weights(self) -> list[Tensor]:
        """The smallest gate and the smallest weight that are trained: enough to see whether anything moves."""
        gates = trained_gates(self.gated)
        own = {id(gate) for gate in gates}
        weights = [p for p in self.gated.parameters() if p.requires_grad and id(p) not in own]
        return [min(found, key=lambda p: p.numel()) for found in (gates, weights) if found]


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if is_sharded(parameter) else parameter).detach()  # type: ignore[attr-defined]
