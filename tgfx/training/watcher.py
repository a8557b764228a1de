"""What every controller does: see each step of the optimizer that holds the gates, without a call in the loop."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.training.optimizers import not_held
from tgfx.training.schedule import Phase, Schedule


class StepWatcher(ABC):
    """Counts the steps, knows the target of each, and ends with `close()`. Subclasses move the gates."""

    def __init__(self, gated: Any, budget: Mapping[str, float], schedule: Schedule) -> None:
        self.budget = Budget.of(budget)
        self.schedule = schedule
        self.taken = 0
        self._gated = weakref.ref(gated)
        self._weights_only = 0
        self._asked = 0
        self._start: dict[str, float] = dict.fromkeys(self.budget, 1.0)
        self._hooks: list[Any] = []

    def watch_steps(self) -> None:
        """Last in a constructor: a budget that is refused leaves no hook behind."""
        self._hooks += [
            register_optimizer_step_pre_hook(weakly(self, "before_step")),
            register_optimizer_step_post_hook(weakly(self, "after_step")),
        ]
        weakref.finalize(self, _remove_all, self._hooks)  # torch keeps them for the life of the process

    @property
    def gated(self) -> Any:
        gated = self._gated()
        if gated is None:
            raise ReferenceError("the gated model is gone")
        return gated

    @property
    def phase(self) -> Phase:
        return self.schedule.phase(self.taken)

    @property
    def driving(self) -> bool:
        """Whether a step has been seen, so that gates are moved here and not by the optimizer."""
        return self.taken > 0

    @property
    def targets(self) -> dict[str, float]:
        """What the ratios should be now, on the way from where the model was to the budget."""
        return {k: self.schedule.target(self.taken, share, self._start[k]) for k, share in self.budget.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"budget": dict(self.budget), "taken": self.taken, "start": dict(self._start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["budget"] != dict(self.budget):
            raise BudgetError(
                "the saved state is for another budget", expected=str(self.budget), found=str(state["budget"])
            )
        self.taken, self._start = state["taken"], dict(state["start"])

    @property
    def closed(self) -> bool:
        """Whether it has stopped watching."""
        return not self._hooks

    def close(self) -> None:
        """Stop watching; the gates stay as they are."""
        _remove_all(self._hooks)

    def asked(self) -> None:
        """A loss was asked for. An optimizer that steps in between and never holds the gates is a mistake."""
        self._asked += 1
        if self._asked > 3 and self._weights_only > 2 and not self.driving:
            gates = {id(gate.weight) for gate in self.gated.gates.values()}
            raise not_held(self.gated, [name for name, p in self.gated.named_parameters() if id(p) in gates])

    def holds_gates(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer is a step of ours; others are counted, as a sign of a mistake."""
        gate = next(iter(self.gated.gates.values())).weight
        held = any(p is gate for group in optimizer.param_groups for p in group["params"])
        if held:
            self._weights_only = self._asked = 0
        else:
            self._weights_only += 1
        return held

    @abstractmethod
    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Called before every step of any optimizer."""

    @abstractmethod
    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Called after every step of any optimizer."""


def _remove_all(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def weakly(watcher: StepWatcher, method: str) -> Any:
    """A hook that calls a method as long as the watcher and its model are there: hooks outlive both."""
    own = weakref.ref(watcher)

    def hook(*args: Any) -> None:
        alive = own()
        if alive is not None and alive._gated() is not None:
            getattr(alive, method)(*args)

    return hook
