"""Which alternatives of choices a budget can afford.

Other gates close one by one until a budget is met. Of a choice exactly one alternative is open, and descent decides
which. Where that leaves too little for the rest of the model, choices change to cheaper alternatives here, the least
sure ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.errors import BudgetError
from tgfx.sharding import whole

if TYPE_CHECKING:
    from tgfx.gated import GatedModule
    from tgfx.training.selection import Prices


def choice_slots(gated: GatedModule) -> dict[str, Tensor]:
    """Name of each choice -> the slots of its alternatives, choices inside an alternative before the one around it."""
    names = [group.name for group in gated.facts.coupling.groups if group.kind == "choice"]
    names = [name for name in names if gated.gates[name].weight.requires_grad]  # those that are held stay
    names.sort(key=lambda name: -name.count("."))
    return {name: torch.from_numpy(gated.gate_slots(name)) for name in names}


def cheapest_alternatives(gated: GatedModule, price: Callable[[Tensor], float], opened: Tensor) -> Tensor:
    """`opened` with the cheapest alternative of every choice.

    Inner choices come first, and what lies around them is open meanwhile: they could have no price otherwise.
    """
    opened, choices = opened.clone(), choice_slots(gated)
    for slots in choices.values():
        opened[slots] = True
    for slots in choices.values():
        options = [_with(opened, slots, int(slot)) for slot in slots]
        opened = min(options, key=price)
    return opened


def affordable(gated: GatedModule, prices: Prices, least: Tensor, targets: Mapping[str, float]) -> Tensor:
    """`least`, the fewest gates that may be open, with alternatives that meet the targets.

    Those that are chosen stay as far as they can: one by one, the change that gives up the smallest lead is made, of
    those that bring the cost nearer. BudgetError if no alternatives do.
    """
    opened, choices = least, choice_slots(gated)
    weights = {name: whole(gated.gates[name].weight.detach()) for name in choices}
    leads = {name: (own.max() - own).tolist() for name, own in weights.items()}

    def excess(assignment: Tensor) -> float:
        return sum(max(0.0, prices.ratio(kind, assignment) / share - 1) for kind, share in targets.items())

    while not prices.met(opened, targets):
        now, changes = excess(opened), []
        for name, slots in choices.items():
            for slot, lead in zip(slots.tolist(), leads[name], strict=True):
                changed = _with(opened, slots, slot)
                if excess(changed) < now:
                    changes.append((lead, slot, changed))
        if not changes:
            break
        opened = min(changes, key=lambda change: change[:2])[2]
    if not prices.met(opened, targets):  # an alternative may be cheap only after a choice inside it has changed
        opened = cheapest_alternatives(gated, excess, opened)
    if not prices.met(opened, targets):
        raise unaffordable(prices, opened, targets)
    return opened


def set_alternatives_(gated: GatedModule, opened: Tensor) -> bool:
    """Choose these alternatives; whether any changed."""
    changed = False
    for name, slots in choice_slots(gated).items():
        gate, mask = gated.gates[name], opened[slots.to(opened.device)]
        own = mask.to(gate.weight.device)
        if not torch.equal(whole(gate.is_open()), own):
            gate.set_open_(own)
            changed = True
    return changed


def unaffordable(prices: Prices, least: Tensor, targets: Mapping[str, float]) -> BudgetError:
    reached = {kind: prices.ratio(kind, least) for kind in targets}
    return BudgetError(
        "the budget cannot be met, whatever alternatives are chosen",
        expected=", ".join(f"{kind} of at least {ratio:.4f}" for kind, ratio in reached.items()),
        found=", ".join(f"{kind} {share:.1%}" for kind, share in targets.items()),
        fix="ask for a larger budget, or add cheaper alternatives",
    )


def _with(opened: Tensor, slots: Tensor, slot: int) -> Tensor:
    changed = opened.clone()
    changed[slots] = slots.to(opened.device) == slot
    return changed
