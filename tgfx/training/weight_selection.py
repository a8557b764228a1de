"""Which gates of single weights stay open: those with the largest latent weights that a budget has room for.

Gates are as many as weights, so nothing is sorted and nothing is kept per gate. The threshold is found by halving, each
try being a pass over the gates in blocks. Where latent weights tie at the threshold (all do in a fresh model), the
larger weights stay, found the same way; where these tie too, the first ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tgfx.ops.weight_gate import row_blocks

BY_CHANCE = 1e-6  # of all gates: so few that tie do so by rounding, and no pass is spent on their order

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class Candidates:
    """The gates of one weight, the weight itself, and what an open gate costs (broadcasts to the weight) by kind."""

    latent: Tensor
    weight: Tensor
    prices: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        return self.latent.numel()

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their latent weights and their weights; in bfloat16 a threshold of float32 could not be compared to."""
        for rows in row_blocks(self.latent.shape):
            yield rows, _precise(self.latent[rows]), _precise(self.weight[rows])

    def price(self, kind: str, rows: slice) -> Tensor:
        """Of these rows' gates, or of size 1 if all cost the same."""
        price = self.prices[kind]
        return price[rows] if price.shape[0] > 1 else price


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
                    tied = (latent > self.bottom) & (weight.abs() > self.small) & ~opened
                    if bool(tied.any()):
                        opened |= _first_that_fit(own, rows, tied, room)
                yield own, rows, opened


def largest(gates: Sequence[Candidates], room: Amounts) -> Cutoff:
    """As many of the largest as there is room for, by every kind of cost."""
    least = min(float(own.latent.min()) for own in gates)
    most = max(float(own.latent.max()) for own in gates)

    def fits(opened: Callable[[Tensor, Tensor], Tensor]) -> bool:
        return all(found <= room[kind] for kind, found in _cost(gates, room, opened).items())

    below = min(0.0, _ranked(_rank(least) - 1))  # all are open there
    if fits(lambda latent, weight: latent > below):
        return Cutoff(below, below)
    top, bottom = _lowest(lambda shift: fits(lambda latent, weight: latent > shift), below, most)
    cutoff = Cutoff(top, bottom)
    if _count(gates, lambda latent, weight: (latent > bottom) & (latent <= top)) > _by_chance(gates):
        biggest = max(float(weight.abs().max()) for own in gates for _, _, weight in own.blocks())
        large, small = _lowest(lambda size: fits(Cutoff(top, bottom, size).sure), -1.0, biggest)
        cutoff = replace(cutoff, large=large, small=small)
    else:
        cutoff = replace(cutoff, small=-1.0)
    spent = _cost(gates, room, cutoff.sure)
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
        moved = _precise(own.latent[rows]) - cutoff.top
        least = torch.finfo(own.latent.dtype).tiny
        own.latent[rows] = torch.where(opened, moved.clamp(min=least), moved.clamp(max=0))
    return True


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _first_that_fit(own: Candidates, rows: slice, tied: Tensor, room: dict[str, float]) -> Tensor:
    """The first of these ties that there is room for, which is taken up."""
    fit = tied.flatten()
    prices = {kind: (tied * own.price(kind, rows)).flatten() for kind in room}
    for kind, price in prices.items():
        fit = fit & (price.cumsum(0, dtype=torch.float64) <= room[kind])
    for kind, price in prices.items():
        room[kind] -= float(price[fit].sum())
    return fit.reshape(tied.shape)


def _cost(
    gates: Sequence[Candidates], kinds: Mapping[str, float], opened: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    total = dict.fromkeys(kinds, 0.0)
    for own in gates:
        sums = {kind: torch.zeros((), dtype=torch.float64, device=own.latent.device) for kind in kinds}
        for rows, latent, weight in own.blocks():
            mask = opened(latent, weight)
            count = mask.sum()
            for kind in kinds:
                price = own.price(kind, rows)
                sums[kind] += count * price.sum() if price.numel() == 1 else (mask * price).sum()
        for kind in kinds:
            total[kind] += float(sums[kind])
    return total


def _count(gates: Sequence[Candidates], chosen: Callable[[Tensor, Tensor], Tensor]) -> int:
    return sum(int(chosen(latent, weight).sum()) for own in gates for _, latent, weight in own.blocks())


def _by_chance(gates: Sequence[Candidates]) -> int:
    return max(1, int(BY_CHANCE * sum(own.count for own in gates)))  # one alone does not fit, or it would be open


def _lowest(fits: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """The lowest threshold that fits, and the number before it, which does not; `high` fits and `low` does not.

    Halved by rank among the numbers of float32, not by size: what gates cost spans many orders of magnitude.
    """
    no, yes = _rank(low), _rank(high)
    if _ranked(yes) < high:  # float64 lies between the numbers of float32
        yes += 1
    while yes - no > 1:
        middle = (no + yes) // 2
        if fits(_ranked(middle)):
            yes = middle
        else:
            no = middle
    return _ranked(yes), _ranked(no)


def _rank(number: float) -> int:
    """Place of a number among all of float32: the bits of a positive one, read as a whole number, keep the order."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _ranked(rank: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<i", abs(rank)))
    return number if rank >= 0 else -number
