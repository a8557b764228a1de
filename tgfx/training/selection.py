"""Which gates to close so that a budget is met: the worst by score, and never the last of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.training.alternatives import affordable, cheapest_alternatives, choice_slots, set_alternatives_
from tgfx.training.stops import Stops, least_at
from tgfx.training.vectors import held_slots, movable

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

TRIES = 64  # single gates tried when landing on the budget


class Prices:
    """Costs of a gated model as shares of the whole, for any assignment of its gates."""

    def __init__(self, gated: GatedModule) -> None:
        self._gated = gated
        self.movable = movable(gated)

    def cost(self, kind: str, opened: Tensor, gone: frozenset[str] = frozenset()) -> float:
        return float(self._gated.facts.cost.evaluate(kind, _bank(opened), gone))

    def ratio(self, kind: str, opened: Tensor) -> float:
        return self.cost(kind, opened) / self._gated.total(kind)

    def met(self, opened: Tensor, targets: Mapping[str, float]) -> bool:
        return all(self.ratio(kind, opened) <= target + 1e-12 for kind, target in targets.items())

    def marginal(self, kind: str, opened: Tensor) -> Tensor:
        """Share of the whole that each gate costs, the others as they are."""
        bank = _bank(opened).requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._gated.facts.cost.evaluate(kind, bank), bank)
        return slope[:-1] / self._gated.total(kind)


def _bank(opened: Tensor) -> Tensor:
    return torch.cat([opened.double(), torch.ones(1, dtype=torch.float64, device=opened.device)])


def protected(gated: GatedModule, scores: Tensor, floor: float) -> Tensor:
    """The best of every group: `floor` of its size, rounded up. These stay open whatever the budget.

    A branch under one gate may go as a whole; of a group that compact_ has cut, what is left counts. A group that is
    held (its gates ask for no gradient) keeps what is open.
    """
    keep = held_slots(gated)
    if bool(keep.any()):
        keep &= torch.from_numpy(gated.open_slots())
    keep = keep.to(scores.device)
    for group in gated.facts.coupling.groups:
        if group.is_switch or group.name not in gated.gates or not gated.gates[group.name].weight.requires_grad:
            continue
        own = torch.from_numpy(gated.gate_slots(group.name)).to(scores.device)
        count = min(len(own), max(1, math.ceil(floor * group.size)))
        keep[own[scores[own].topk(count).indices]] = True
    return keep


def all_open(gated: GatedModule, device: torch.device | str = "cpu") -> Tensor:
    """Every gate open that can be moved; the others (choices, removed ones) as they are."""
    return (movable(gated) | torch.from_numpy(gated.open_slots())).to(device)


def cheapest(gated: GatedModule, kind: str, floor: float, stops: Stops | None = None) -> float:
    """The smallest ratio that leaves the floor of every group, and every group at a stop, where there are stops.

    With the cheapest alternatives, whatever is chosen now.
    """
    gated._known_kind(kind)
    prices = Prices(gated)

    def ratio(opened: Tensor) -> float:
        return prices.ratio(kind, opened)

    few = ratio(cheapest_alternatives(gated, ratio, fewest(gated, prices, floor, stops)))
    if stops is None:
        return few
    return min(few, ratio(cheapest_alternatives(gated, ratio, all_open(gated))))  # all may be faster than few


def fewest(
    gated: GatedModule, prices: Prices, floor: float, stops: Stops | None = None, scores: Tensor | None = None
) -> Tensor:
    """As few gates open as may be: the best of every group, by the scores or by their order; choices as they are."""
    if scores is None:
        scores = torch.arange(gated.facts.coupling.slots, 0, -1, dtype=torch.float64)
    if stops is not None:
        return least_at(gated, prices, scores, stops, floor)
    others = torch.from_numpy(gated.open_slots()) & ~prices.movable
    return protected(gated, scores, floor) | others.to(scores.device)


def change_alternatives_(gated: GatedModule, prices: Prices, least: Tensor, targets: Mapping[str, float]) -> bool:
    """Choose other alternatives, where not even `least` meets the targets; whether any changed. BudgetError if none do.

    A measured cost may be lower with all gates open than with few.
    """
    if not choice_slots(gated) or prices.met(least, targets) or prices.met(all_open(gated, least.device), targets):
        return False
    return set_alternatives_(gated, affordable(gated, prices, least, targets))


def close_worst(
    prices: Prices, scores: Tensor, start: Tensor, keep: Tensor, targets: Mapping[str, float]
) -> tuple[Tensor, float]:
    """Close gates of `start`, but none of `keep`, in the order of their scores until every target is met.

    Gives the assignment, and the score reached.
    """
    closable = start & ~keep & prices.movable.to(start.device)
    order = scores.where(closable, math.inf).argsort(stable=True)

    def closed(count: int) -> Tensor:
        opened = start.clone()
        opened[order[:count]] = False
        return opened

    low, high = 0, int(closable.sum())  # the cost falls with the count
    while low < high:
        middle = (low + high) // 2
        if prices.met(closed(middle), targets):
            high = middle
        else:
            low = middle + 1
    opened = closed(low)
    threshold = float(scores[order[low - 1]]) if low else -math.inf
    return opened, threshold


def best_closed(scores: Tensor, closed: Tensor, count: int) -> Tensor:
    """The `count` best of the closed gates."""
    best = torch.zeros_like(closed)
    indices = scores.where(closed, -math.inf).topk(min(count, int(closed.sum()))).indices
    best[indices] = True
    return best


def land(prices: Prices, opened: Tensor, scores: Tensor, targets: Mapping[str, float]) -> Tensor:
    """Open the best of the closed that still fit, one by one, so that the budget is used up."""
    opened = opened.clone()
    refused = ~prices.movable.to(opened.device)
    for _ in range(TRIES):
        fits = ~opened & ~refused
        for kind, target in targets.items():
            fits &= prices.marginal(kind, opened) <= target - prices.ratio(kind, opened)
        if not bool(fits.any()):
            break
        best = int(scores.where(fits, -math.inf).argmax())
        opened[best] = True
        if not prices.met(opened, targets):
            opened[best], refused[best] = False, True
    return opened
