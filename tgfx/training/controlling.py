"""Who moves the gates during a run of `tgfx.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.training.controller_for import Controller, check_reachable, controller_for
from tgfx.training.schedule import Schedule
from tgfx.training.settings import Settings


@contextmanager
def controlled(
    gated: GatedModule, settings: Settings, total: int, schedule: Schedule | None
) -> Iterator[Controller | None]:
    """The default rule's controller for the time of the run; None where the optimizer moves the gates, or nobody does.

    A controller that `budget_loss` made before ends here: two would undo each other's moves.
    """
    if gated.controller is not None:
        gated.controller.close()
    gated.__dict__["_controller"] = None
    if settings.budget is not None and settings.rule == "paper":
        check_reachable(gated, settings.budget)
    if settings.budget is None or settings.rule == "paper":
        yield None
        return
    schedule = schedule or (Schedule.for_gates if settings.train == "gates" else Schedule)(total)
    if schedule.steps > total:
        raise InputError(
            "the schedule is longer than the run", expected=f"at most {total} steps", found=str(schedule.steps)
        )
    controller = gated.attach(controller_for(gated, settings.budget, schedule))
    try:
        yield controller
    finally:
        controller.close()
        gated.__dict__["_controller"] = None
