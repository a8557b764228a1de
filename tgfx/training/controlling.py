"""Who moves the gates during a run of `tgfx.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.training.controller_for import Controller, controller_for
from tgfx.training.settings import Settings


@contextmanager
def controlled(gated: GatedModule, settings: Settings, total: int) -> Iterator[Controller | None]:
    """The default rule's controller for the time of the run; None where the optimizer moves the gates, or nobody does.

    A controller that `budget_loss` made before ends here: two would undo each other's moves.
    """
    gated._unwatched()
    schedule = settings.schedule_of(total)
    if settings.budget is None or schedule is None:
        if settings.budget is not None:
            gated._check_feasible(settings.budget)
        try:
            yield None
        finally:
            gated._unwatched()
        return
    if schedule.steps > total:
        raise InputError(
            "the schedule is longer than the run", expected=f"at most {total} steps", found=str(schedule.steps)
        )
    controller = controller_for(gated, settings.budget, schedule, round_to=settings.round_to)
    controller.owner = "tgfx.fit"
    gated.attach(controller)
    try:
        yield controller
    finally:
        controller.close()
        gated._unwatched()
