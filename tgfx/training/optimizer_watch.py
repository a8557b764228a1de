"""Whoever a budget was asked from: sees each step of the optimizer that holds the gates, without a call in the loop."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tgfx.budget import Budget
from tgfx.errors import BudgetError
from tgfx.training.closures import Arguments
from tgfx.training.optimizers import all_gates, not_held, trained_gates


class OptimizerWatch(ABC):
    """Knows what was asked for since the last step, finds out an optimizer without the gates; ends with `close()`."""

    owner: str | None = None  # who decides about the budget, where it is not budget_loss: tgfx.fit, a callback

    def __init__(self, gated: Any, budget: Mapping[str, float]) -> None:
        self.budget = Budget.of(budget)
        self._gated = weakref.ref(gated)
        self._hooks: list[Any] = []
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that stepped and do not hold the gates
        self._gates_held = False  # by an optimizer that has stepped
        self._weights_only = 0
        self._asked = 0
        self._wanted: set[Budget] = set()  # since the last step of ours
        self._wanted_before: set[Budget] = set()  # and before that

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
    def closed(self) -> bool:
        """Whether it has stopped watching."""
        return not self._hooks

    def close(self) -> None:
        """Stop watching; the gates stay as they are."""
        _remove_all(self._hooks)

    @property
    def steps_seen(self) -> bool:
        """Whether an optimizer that holds the gates has stepped."""
        return bool(self._wanted_before)

    @property
    def waits_for_a_step(self) -> bool:
        """Whether it was asked since the last step."""
        return bool(self._wanted)

    @abstractmethod
    def retarget(self, budget: Budget) -> None:
        """Other shares of the same kinds from now on; raises BudgetError if they cannot be met."""

    def asked(self, budget: Budget) -> None:
        """A loss for this budget was asked for, between two steps. What cannot be meant is an error."""
        self._asked += 1
        if budget != self.budget:
            self.retarget(budget)
        self._wanted.add(budget)
        if len(self._wanted) > 1 and self._wanted == self._wanted_before:
            # a share that changes with time is not the same again: these are two terms of one loss
            raise two_budgets(*map(str, sorted(self._wanted, key=str)[:2]))
        if self._asked > 3 and self._weights_only > 2 and not self.steps_seen:
            raise self._not_held()

    def _not_held(self) -> Exception:
        """An optimizer steps in between and never holds the gates: what else does it lack?"""
        held = {id(p) for optimizer in self._strangers for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p) for name, p in self.gated.named_parameters() if p.requires_grad]
        return not_held(self.gated, [name for name, p in trained if id(p) not in held])

    def holds_gates(self, optimizer: Optimizer) -> bool:
        """Whether a step of this optimizer is a step of ours; others are counted, as a sign of a mistake."""
        held = self._is_ours(optimizer)
        if held:
            self._weights_only = self._asked = 0
            if self._wanted:
                self._wanted, self._wanted_before = set(), self._wanted
        else:
            self._weights_only += 1
            self._strangers.add(optimizer)
        return held

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """It holds the gates, be they trained just now or not: optimizers that take turns freeze what others hold.

        Where nobody holds gates since all stay as they are, it is whoever trains the weights.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moving = trained_gates(self.gated)
        if any(id(gate) in own for gate in (moving or all_gates(self.gated))):
            self._gates_held = True
            return True
        trained = next((p for p in self.gated.parameters() if p.requires_grad), None)
        return not moving and not self._gates_held and id(trained) in own

    @abstractmethod
    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> Arguments | None:
        """Called before every step of any optimizer; other arguments for it, or None."""

    @abstractmethod
    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Called after every step of any optimizer."""


def two_budgets(one: str, other: str) -> BudgetError:
    return BudgetError(
        "two budgets were asked for before one optimizer step",
        expected="one budget_loss in the loss, with all that is wanted",
        found=f"{one}, and {other}",
        fix="give all kinds in one call, budget_loss(flops=0.5, params=0.5); for the log alone, ask in torch.no_grad()",
    )


def _remove_all(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def weakly(watch: OptimizerWatch, method: str) -> Any:
    """A hook that calls a method as long as the watch and its model are there: hooks outlive both."""
    own = weakref.ref(watch)

    def hook(*args: Any) -> Any:
        alive = own()
        if alive is not None and alive._gated() is not None:
            return getattr(alive, method)(*args)
        return None

    return hook
