"""Landing on a budget with few and dear gates: one opens for another that costs less, until the budget is used up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.training.selection import Prices

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

NEAR = 0.005  # of the whole cost, from a target: good enough
ROUNDS = 8
TRIES = 16  # pairs in a round: what two gates cost together is foretold from what each costs


def exchange(
    gated: GatedModule, prices: Prices, opened: Tensor, scores: Tensor, keep: Tensor, targets: Mapping[str, float]
) -> Tensor:
    """`opened`, which meets the targets, nearer to them where no closed gate fits; none of `keep` is closed.

    Gates close in the order of their scores, so the last one may be dear and leave much of the budget. Of each group
    the best closed and the worst open gate are tried, and the pair that uses most of what is left is taken.
    """
    opened = opened.clone()
    for _ in range(ROUNDS):
        left = {kind: share - prices.ratio(kind, opened) for kind, share in targets.items()}
        kind = min(left, key=left.__getitem__)  # the budget that binds
        if left[kind] <= NEAR:
            break
        better = _best_pair(gated, prices, opened, scores, keep, targets, left, kind)
        if better is None:
            break
        opened = better
    return opened


def _best_pair(
    gated: GatedModule,
    prices: Prices,
    opened: Tensor,
    scores: Tensor,
    keep: Tensor,
    targets: Mapping[str, float],
    left: Mapping[str, float],
    kind: str,
) -> Tensor | None:
    movable = prices.movable.to(opened.device)
    opens, closes = [], []
    for name in gated.gates:
        own = torch.from_numpy(gated.gate_slots(name)).to(opened.device)
        closed, open_ = own[movable[own] & ~opened[own]], own[movable[own] & opened[own] & ~keep[own]]
        if len(closed):
            opens.append(closed[scores[closed].argmax()])
        if len(open_):
            closes.append(open_[scores[open_].argmin()])
    if not opens or not closes:
        return None
    first, second = torch.stack(opens), torch.stack(closes)
    gains: dict[str, Tensor] = {}
    for each in targets:
        slope = prices.marginal(each, opened)
        gains[each] = slope[first].unsqueeze(1) - slope[second].unsqueeze(0)
    # a little less than foretold, where both gates meet in one layer: so the nearest are tried, be they above or below
    distance = torch.stack([(gain - left[each]).abs() for each, gain in gains.items()]).amax(0)
    best, found = prices.ratio(kind, opened), None
    for place in distance.flatten().argsort()[:TRIES].tolist():
        row, column = divmod(place, len(second))
        trial = opened.clone()
        trial[first[row]], trial[second[column]] = True, False
        if prices.met(trial, targets) and (ratio := prices.ratio(kind, trial)) > best + 1e-9:
            best, found = ratio, trial
    return found
