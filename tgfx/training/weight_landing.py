"""Gates over single weights at a budget: all latent weights are moved alike until it is met, to within one weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tgfx.errors import BudgetError
from tgfx.training.feasible import more_gates
from tgfx.training.weight_candidates import Candidates
from tgfx.training.weight_selection import Cutoff, cost, counts_of, largest, shift_

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

GATES = "gates"  # counted, beside the kinds of cost
SLACK = 1e-12  # of the whole cost: the rounding of shares


def check_weight_budget(gated: WeightGatedModule, budget: Mapping[str, float], floor: float | None = None) -> None:
    """Refuse a budget below what has no gate; with a floor, below that and `floor` of every weight."""
    for kind, share in budget.items():
        least = gated.cheapest(kind)
        what = "what has no gate costs more"
        if floor is not None:
            shapes, prices = gated.facts.cost.shapes, gated.facts.cost.factors[kind]
            moved = [name for name, gate in gated.gates.items() if gate.weight.requires_grad]
            kept = sum(_kept(shapes[name], floor) * float(prices[name].max()) for name in moved)
            least += kept / gated.total(kind)
            what = "what has no gate, and the last weights of each layer, cost more"
        if share < least:
            raise BudgetError(
                f"budget {kind}={share:g} cannot be met: {what}",
                expected=f"{kind} of at least {least:.4f}",
                found=f"{share:g}",
                fix=f"ask for {kind}={math.ceil(least * 1000) / 1000:g} or more, or {more_gates(gated)}",
            )


@torch.no_grad()
def shift_to_(gated: WeightGatedModule, targets: Mapping[str, float], floor: float = 0.0) -> float:
    """Move the gates so that every target is met, and the nearest is used up to within one weight; by how much.

    Every weight keeps the best of its gates, `floor` of them and at least one, where there is room for that. 0 where
    the gates were there already.
    """
    fixed = {kind: gated.fixed_cost(kind) for kind in targets}
    room = {kind: share * gated.total(kind) * (1 + SLACK) - fixed[kind] for kind, share in targets.items()}
    free = _candidates(gated, targets)
    first = cutoff = largest(list(free.values()), room)
    apart: dict[str, tuple[Candidates, Cutoff]] = {}
    while free:
        counts = counts_of(list(free.values()), cutoff)
        found = zip(free.items(), counts, strict=True)
        short = [name for (name, own), count in found if count < _kept(own.latent.shape, floor)]
        if not short:
            break
        for name in short:  # these are too few: they get what they must have, and the rest shares what is left
            own = free.pop(name)
            apart[name] = own, largest([own], {GATES: _kept(own.latent.shape, floor)})
            taken = cost([own], apart[name][1], room)
            room = {kind: left - taken[kind] for kind, left in room.items()}
        if min(room.values()) < 0:  # not even that: then the largest, wherever they are
            free, apart, cutoff = _candidates(gated, targets), {}, first
            break
        if free:
            cutoff = largest(list(free.values()), room)
    for own, at in apart.values():
        shift_([own], at)
    return cutoff.top if free and shift_(list(free.values()), cutoff) else 0.0


def _candidates(gated: WeightGatedModule, kinds: Mapping[str, float]) -> dict[str, Candidates]:
    factors = gated.facts.cost.factors
    found = {}
    for name, gate in gated.gates.items():
        if not gate.weight.requires_grad:  # held
            continue
        prices = {kind: factors[kind][name].to(gate.weight.device) for kind in kinds}
        one = torch.ones([1] * gate.weight.ndim, dtype=torch.float64, device=gate.weight.device)
        weight = gated.get_parameter(name).detach()
        found[name] = Candidates(gate.weight.detach(), weight, {**prices, GATES: one})
    return found


def _kept(shape: torch.Size, floor: float) -> int:
    return max(1, math.ceil(floor * shape.numel()))
