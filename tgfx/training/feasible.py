"""What can be asked of a gated model before it is trained: gates that can be decided, budgets that can be met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tgfx.errors import BudgetError
from tgfx.gates import TrainableGate
from tgfx.training.alternatives import affordable, choice_slots
from tgfx.training.selection import Prices, cheapest, fewest
from tgfx.training.stops import stops_for

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


def check_feasible(
    gated: GatedModule, budget: Mapping[str, float], floor: float = 0.0, round_to: int | None = None
) -> None:
    """Refuse a budget that no assignment of the gates can meet."""
    stops = stops_for(gated, budget, round_to)
    for kind, share in budget.items():
        least = cheapest(gated, kind, floor, stops)
        if share < least:
            raise BudgetError(
                f"budget {kind}={share:g} cannot be met: what has no gate, and the last channels, cost more",
                expected=f"{kind} of at least {least:.4f}",
                found=f"{share:g}",
                fix=f"ask for {kind}={math.ceil(least * 1000) / 1000:g} or more, or {more_gates(gated)}"
                + ("" if round_to in (None, 1) else ", or use a smaller round_to"),
            )
    if len(budget) > 1 and choice_slots(gated):
        prices = Prices(gated)  # each can be met, but the same alternatives must meet them all
        affordable(gated, prices, fewest(gated, prices, floor, stops), budget)


def more_gates(gated: GatedModule) -> str:
    """What would let a smaller budget be met."""
    held = [name for name, gate in gated.gates.items() if not gate.weight.requires_grad]
    if not held:
        return "gate more of the model"
    more = f" and {len(held) - 4} more" if len(held) > 4 else ""
    return f"let these gates move: requires_grad_(True) for the weights of {', '.join(held[:4])}{more}"


def check_sign_decides(gated: GatedModule) -> None:
    """Refuse gates that would not be open where a controller writes a positive weight, and closed elsewhere."""
    for gate in gated.gates.values():
        if isinstance(gate, TrainableGate):
            gate.settings.check_sign_decides()
