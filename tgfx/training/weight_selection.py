"""Which gates of single weights stay open: those with the largest latent weights that a budget has room for.

Gates are as many as weights, so they are not sorted and nothing is kept per gate. The threshold is found in a few
passes over the gates in blocks (tgfx.training.weight_threshold). Where latent weights tie at the threshold (all do in
a fresh model), the larger weights stay, found by halving; where these tie too, the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tgfx.training.weight_candidates import Amounts, Candidates, precise
from tgfx.training.weight_threshold import cost_where, just_below, lowest, threshold

BY_CHANCE = 1e-6  # of all gates: so few that tie do so by rounding, and no pass is spent on their order


@dataclass(frozen=True)
class Cutoff:
    """Open are: latent weights above `top`; above `bottom`, sizes above `large`; above `small`, the first with room.

    Without ties the last two are empty. `room`: what is left for the last of the three.
    """

    top: float
    bottom: float
    large: float = math.inf
    small: float = math.inf
    room: Amounts = field(default_factory=dict)

    def sure(self, latent: Tensor, weight: Tensor) -> Tensor:
        """What is open, but for the last of the ties."""
        opened = latent > self.top
        if self.large < math.inf:
            opened |= (latent > self.bottom) & (weight.abs() > self.large)
        return opened

    def masks(self, gates: Sequence[Candidates]) -> Iterator[tuple[Candidates, slice, Tensor]]:
        """Which gates are open, block by block; the same however often it is asked."""
        room = dict(self.room)
        for own in gates:
            for rows, latent, weight in own.blocks():
                opened = self.sure(latent, weight)
                if room:
                    tied = (latent > self.bottom) ^ opened
                    if self.small >= 0:  # else all are larger
                        tied &= weight.abs() > self.small
                    if bool(tied.any()):
                        opened |= _first_that_fit(own, rows, tied, room)
                yield own, rows, opened


def largest(gates: Sequence[Candidates], room: Amounts) -> Cutoff:
    """As many of the largest as there is room for, by every kind of cost."""
    least = min(float(own.latent.min()) for own in gates)
    most = max(float(own.latent.max()) for own in gates)

    def fits(opened: Callable[[Tensor, Tensor], Tensor]) -> bool:
        return all(found <= room[kind] for kind, found in cost_where(gates, room, opened).items())

    below = min(0.0, just_below(least))  # all are open there
    if fits(lambda latent, weight: latent > below):
        return Cutoff(below, below)
    top, bottom = threshold(gates, room, below, most)
    cutoff = Cutoff(top, bottom)
    if _count(gates, lambda latent, weight: (latent > bottom) & (latent <= top)) > _by_chance(gates):
        biggest = max(float(weight.abs().max()) for own in gates for _, _, weight in own.blocks())
        large, small = lowest(lambda size: fits(Cutoff(top, bottom, size).sure), -1.0, biggest)
        cutoff = replace(cutoff, large=large, small=small)
    else:
        cutoff = replace(cutoff, small=-1.0)
    spent = cost_where(gates, room, cutoff.sure)
    return replace(cutoff, room={kind: left - spent[kind] for kind, left in room.items()})


def counts_of(gates: Sequence[Candidates], cutoff: Cutoff) -> list[int]:
    """How many gates of each weight a cutoff leaves open."""
    counts = {id(own.latent): 0 for own in gates}
    for own, _, opened in cutoff.masks(gates):
        counts[id(own.latent)] += int(opened.sum())
    return list(counts.values())


def cost(gates: Sequence[Candidates], cutoff: Cutoff, kinds: Mapping[str, float]) -> dict[str, float]:
    """Of the gates that a cutoff leaves open."""
    total = dict.fromkeys(kinds, 0.0)
    for own, rows, opened in cutoff.masks(gates):
        for kind in kinds:
            total[kind] += float((opened * own.price(kind, rows)).sum())
    return total


def shift_(gates: Sequence[Candidates], cutoff: Cutoff) -> bool:
    """Move all latent weights alike, so that exactly those of the cutoff are above zero; False if they were already."""
    before = _count(gates, lambda latent, weight: latent > 0)
    if before == sum(counts_of(gates, cutoff)):  # open ones are the largest now and then: as many are the same
        return False
    for own, rows, opened in cutoff.masks(gates):
        moved = precise(own.latent[rows]) - cutoff.top
        least = torch.finfo(own.latent.dtype).tiny
        own.latent[rows] = torch.where(opened, moved.clamp(min=least), moved.clamp(max=0))
    return True


def _first_that_fit(own: Candidates, rows: slice, tied: Tensor, room: dict[str, float]) -> Tensor:
    """The first of these ties that there is room for, which is taken up."""
    fit = tied.flatten()
    prices = {kind: (tied * own.price(kind, rows)).flatten() for kind in room}
    for kind, price in prices.items():
        fit = fit & (price.cumsum(0, dtype=torch.float64) <= room[kind])
    for kind, price in prices.items():
        room[kind] -= float(price[fit].sum())
    return fit.reshape(tied.shape)


def _count(gates: Sequence[Candidates], chosen: Callable[[Tensor, Tensor], Tensor]) -> int:
    return sum(int(chosen(latent, weight).sum()) for own in gates for _, latent, weight in own.blocks())


def _by_chance(gates: Sequence[Candidates]) -> int:
    return max(1, int(BY_CHANCE * sum(own.count for own in gates)))  # one alone does not fit, or it would be open
