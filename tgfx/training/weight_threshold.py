"""The lowest threshold whose larger latent weights fit into a budget, in a few passes over all of them.

Halving takes a pass for each of the 32 bits of a number. Here a sample tells about where the threshold is:

    sample → an interval that should hold it → two passes prove that it does → the few gates in it are halved → one pass

A sample that misled costs these passes, and halving over all gates goes on from what they proved. So what is found is
what halving alone finds, whichever gates were looked at.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tgfx.training.weight_candidates import Amounts, Candidates

SAMPLE = 1 << 20  # latent weights to guess from: below, all are halved
MARGIN = 0.005  # of the sample, on either side of the guess
COPIED = 1 / 16  # of all gates, at most

Interval = tuple[float, float]  # of thresholds: the lower one does not fit, the upper one does


def threshold(gates: Sequence[Candidates], room: Amounts, low: float, high: float) -> Interval:
    """The lowest number of float32 that fits, and the one before it; `high` fits and `low` does not."""

    def fits(shift: float) -> bool:
        return _within(cost_where(gates, room, lambda latent, weight: latent > shift), room)

    if sum(own.count for own in gates) > SAMPLE:
        low, high = _proven(_guess(gates, room), fits, (low, high))
        found = _halved_within(gates, room, (low, high))
        if found is not None and (found[0] >= high or fits(found[0])):  # or sums of prices were rounded otherwise
            return found
    return lowest(fits, low, high)


def lowest(fits: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
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


def cost_where(
    gates: Sequence[Candidates], kinds: Amounts, opened: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, float]:
    """What the gates cost that are `opened`, which is asked block by block with their latent weights and weights."""
    total = dict.fromkeys(kinds, 0.0)
    for own in gates:
        sums = {kind: torch.zeros((), dtype=torch.float64, device=own.latent.device) for kind in kinds}
        for rows, latent, weight in own.blocks():
            mask = opened(latent, weight)
            count = mask.count_nonzero()
            for kind in kinds:
                price = own.price(kind, rows)
                sums[kind] += count * price.sum() if price.numel() == 1 else (mask * price).sum()
        for kind in kinds:
            total[kind] += float(sums[kind])
    return total


def just_below(number: float) -> float:
    """The number of float32 before this one."""
    return _ranked(_rank(number) - 1)


def _within(cost: Amounts, room: Amounts) -> bool:
    return all(found <= room[kind] for kind, found in cost.items())


def _guess(gates: Sequence[Candidates], room: Amounts) -> Interval:
    """Where the threshold should be, from every n-th gate; infinite where the sample ends."""
    stride = -(-sum(own.count for own in gates) // SAMPLE)
    values, prices = [], {kind: [] for kind in room}  # type: ignore[var-annotated]
    for own in gates:
        index = torch.arange(0, own.count, stride, device=own.latent.device)
        places = torch.unravel_index(index, own.latent.shape)
        values.append(own.latent[places].double())
        for kind in room:
            prices[kind].append(own.prices_at(kind, places).double())
    found, order = torch.cat(values).sort(descending=True)
    fit = torch.ones_like(found, dtype=torch.bool)
    for kind, left in room.items():
        fit &= torch.cat(prices[kind])[order].cumsum(0) * stride <= left
    last, margin = int(fit.count_nonzero()), math.ceil(MARGIN * len(found))
    above, below = last - margin, last + margin
    return (
        just_below(float(found[below])) if below < len(found) else -math.inf,  # so that ties are all within
        float(found[above]) if above >= 0 else math.inf,
    )


def _proven(guess: Interval, fits: Callable[[float], bool], known: Interval) -> Interval:
    """The part of what is known that holds the threshold, by asking at both ends of the guess."""
    low, high = known
    below, above = (_ranked(_rank(end)) if math.isfinite(end) else end for end in guess)
    if low < above < high:
        low, high = (low, above) if fits(above) else (above, high)
    if low < below < high:
        low, high = (low, below) if fits(below) else (below, high)
    return low, high


def _halved_within(gates: Sequence[Candidates], room: Amounts, interval: Interval) -> tuple[float, float] | None:
    """`lowest` among the gates of an interval, which are copied; those above it are counted once. None: too many."""
    low, high = interval
    if _rank(high) - _rank(low) <= 1:
        return lowest(lambda shift: shift >= high, low, high)
    left = COPIED * sum(own.count for own in gates)
    spent = cost_where(gates, room, lambda latent, weight: latent > high)
    values, prices = [], {kind: [] for kind in room}  # type: ignore[var-annotated]
    for own in gates:
        for rows, latent, _ in own.blocks():
            within = (latent > low) & (latent <= high)
            values.append(latent[within])
            left -= len(values[-1])
            if left < 0:
                return None
            for kind in room:
                prices[kind].append(own.price(kind, rows).expand(latent.shape)[within])
    found = torch.cat(values)
    each = {kind: torch.cat(own) for kind, own in prices.items()}

    def fits(shift: float) -> bool:
        chosen = found > shift
        return all(spent[kind] + float(each[kind][chosen].sum(dtype=torch.float64)) <= room[kind] for kind in room)

    return lowest(fits, low, high)


def _rank(number: float) -> int:
    """Place of a number among all of float32: the bits of a positive one, read as a whole number, keep the order."""
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _ranked(rank: int) -> float:
    (number,) = struct.unpack("<f", struct.pack("<i", abs(rank)))
    return number if rank >= 0 else -number
