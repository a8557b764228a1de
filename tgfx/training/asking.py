"""From a call of `budget_loss` in train mode to whoever answers it: a controller, or descent by the optimizer."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tgfx.budget import Budget
from tgfx.errors import BudgetError, InputError
from tgfx.training.descent import Descent
from tgfx.training.optimizer_watch import OptimizerWatch, two_budgets
from tgfx.training.watcher import StepWatcher

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


def ask_descent(gated: GatedModule, budget: Budget) -> None:
    """The paper's rule is asked for: a controller that is at work ends, or it would undo the optimizer's steps."""
    running = _running(gated)
    if not isinstance(running, Descent) or set(running.budget) != set(budget):
        _refuse_two(running, "with a weight", budget)
        running = gated.attach(Descent(gated, budget))
    running.asked(budget)


def ask_controller(
    gated: GatedModule, budget: Budget, steps: int | None, batch_size: int | None, round_to: int | None = None
) -> Any:
    """The controller for this budget.

    Made at the first call, for other kinds of cost, and for another budget once its steps are over. Until then a share
    that changes is a schedule of the user's own, which the controller follows.
    """
    _check_batch_size(batch_size)
    running = _running(gated)
    if not isinstance(running, StepWatcher) or set(running.budget) != set(budget) or _is_over(running, budget, steps):
        _refuse_two(running, "without a weight", budget)
        running = gated.attach(gated._new_controller(budget, steps, round_to))
    elif running.owner is not None and running.budget != budget:
        raise _owned(running, budget)
    elif steps is not None and steps != running.schedule.steps:
        raise InputError(
            "budget_loss was called with another number of steps before",
            expected=f"steps={running.schedule.steps}, the length of the whole training, in every call (or none)",
            found=f"steps={steps!r}, after {running.taken} steps",
            fix="gated.controller.close() before this call begins anew",
        )
    elif round_to is not None and round_to != running.round_to:
        raise InputError(
            "budget_loss was called with another round_to before",
            expected=f"round_to={running.round_to!r} in every call",
            found=f"round_to={round_to!r}, after {running.taken} steps",
            fix="gated.controller.close() before this call begins anew",
        )
    if batch_size is not None:
        running.batch_size = batch_size
    running.asked(budget)
    return running


def refuse_rounded_descent(round_to: int | None) -> None:
    """The paper's rule moves each gate by its own gradient, wherever that leads."""
    if round_to is not None:
        raise InputError(
            "only the default rule moves gates from multiple to multiple",
            expected="round_to without a weight",
            found=f"round_to={round_to!r} and a weight",
            fix="leave it out here; tgfx.finish(gated, ..., round_to=...) rounds at the end",
        )


def check_weight(weight: Any) -> Any:
    """`weight` itself, if equation 7 can be multiplied by it."""
    number = isinstance(weight, Real) and not isinstance(weight, bool)
    if not number and not (isinstance(weight, Tensor) and weight.numel() == 1):
        raise _bad_weight(weight)
    if not (math.isfinite(value := float(weight.detach() if isinstance(weight, Tensor) else weight)) and value >= 0):
        raise _bad_weight(weight)
    return weight


def _bad_weight(weight: Any) -> InputError:
    return InputError(
        "the weight of the budget loss is out of range",
        expected="a finite number, at least 0, e.g. weight=4.0",
        found=f"weight={weight!r}",
    )


def _check_batch_size(batch_size: Any) -> None:
    if batch_size is None or (isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0):
        return
    raise InputError(
        "batch_size is out of range",
        expected="a whole number, at least 1: samples in one optimizer step",
        found=f"batch_size={batch_size!r}",
    )


def _running(gated: GatedModule) -> OptimizerWatch | None:
    watch = gated._watch
    return None if watch is None or watch.closed else watch


def _is_over(controller: StepWatcher, budget: Budget, steps: int | None) -> bool:
    """Its steps have been taken, and now something else is wanted (not in the middle of a step, though)."""
    if controller.owner or controller.waits_for_a_step or controller.taken < controller.schedule.steps:
        return False
    return controller.budget != budget or steps not in (None, controller.schedule.steps)


def _refuse_two(running: OptimizerWatch | None, rule: str, budget: Budget) -> None:
    """Whoever is to be replaced must not be wanted by another term of the same loss, or by another loop."""
    if running is None:
        return
    if running.owner is not None:
        raise _owned(running, budget)
    if running.waits_for_a_step:
        before = "with a weight" if isinstance(running, Descent) else "without a weight"
        raise two_budgets(f"{running.budget} {before}", f"{budget} {rule}")


def _owned(running: OptimizerWatch, budget: Budget) -> BudgetError:
    return BudgetError(
        f"{running.owner} trains this model to a budget of its own",
        expected=str(running.budget),
        found=f"budget_loss for {budget}",
        fix=f"leave budget_loss out of your loss: the budget of {running.owner} is met without it",
    )
