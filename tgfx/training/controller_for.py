"""The controller that fits a gated model: the one place where it is chosen."""

from __future__ import annotations

from collections.abc import Mapping

from tgfx.gated import GatedModule
from tgfx.rounding import refuse_rounding
from tgfx.training.controller import FLOOR, BudgetController
from tgfx.training.schedule import Schedule
from tgfx.training.weight_controller import FLOOR as WEIGHT_FLOOR
from tgfx.training.weight_controller import WeightController
from tgfx.weight.gated import WeightGatedModule

Controller = BudgetController | WeightController


def controller_for(
    gated: GatedModule,
    budget: Mapping[str, float],
    schedule: Schedule,
    *,
    floor: float | None = None,
    batch_size: int | None = None,
    round_to: int | None = None,
) -> Controller:
    """`floor`: share of every group, or weight, that stays open (None: the controller's own).

    `batch_size` is for what the controller cannot see; single weights are compared without it.
    `round_to`: counts of open gates are multiples of it at every step.
    """
    if isinstance(gated, WeightGatedModule):
        refuse_rounding(round_to)
        own = WEIGHT_FLOOR if floor is None else floor
        return WeightController(gated, budget, schedule=schedule, floor=own)
    own = FLOOR if floor is None else floor
    return BudgetController(gated, budget, schedule=schedule, floor=own, batch_size=batch_size, round_to=round_to)
