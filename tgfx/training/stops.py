"""Counts at which groups may stop, where not every count is as good as the next.

Asked for (`round_to=8`), or since a measured cost is in the budget: runtimes work in blocks of channels, and a group
that stops in the middle of a block pays for the whole block, or more. Groups then open and close in chunks, from one
stop to the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tgfx.errors import BudgetError
from tgfx.ir.fast_counts import fast_counts
from tgfx.passes.couple import Group
from tgfx.rounding import reachable, rounded_counts

if TYPE_CHECKING:
    from tgfx.gated import GatedModule
    from tgfx.training.selection import Prices

Stops = Mapping[str, list[int]]


@dataclass(frozen=True)
class Chunk:
    """Gates of one group between two stops, and their mean score."""

    score: float
    group: str
    slots: Tensor


def stops_for(gated: GatedModule, kinds: Iterable[str], round_to: int | None) -> Stops | None:
    """As asked for by `round_to`, or else by what was measured; None: every count is as good as the next."""
    return fast_stops(gated, kinds) if round_to is None else multiples(gated, round_to)


def multiples(gated: GatedModule, multiple: int) -> Stops:
    """Every count that makes multiples, and the whole group."""
    return {group.name: rounded_counts(gated, group, multiple) for group in _chunked(gated)}


def fast_stops(gated: GatedModule, kinds: Iterable[str]) -> Stops | None:
    """Stops by the measured costs among these kinds; None if there are none."""
    costs = [gated.facts.cost.measured[kind] for kind in kinds if kind in gated.facts.cost.measured]
    if not costs:
        return None
    known = gated.__dict__.setdefault("_fast_stops", {})
    key = tuple(cost.table.digest for cost in costs)
    if key not in known:
        known.clear()
        known[key] = {
            group.name: [1] if group.is_switch else fast_counts(np.sum([cost.along(group) for cost in costs], axis=0))
            for group in gated.facts.coupling.groups
            if group.kind != "choice"
        }
    return {group.name: reachable(gated, group, known[key][group.name]) for group in _chunked(gated)}


def _chunked(gated: GatedModule) -> Iterator[Group]:
    """Groups that move; those of choices and those that are held do not."""
    gates = gated.gates
    groups = (g for g in gated.facts.coupling.groups if g.kind != "choice" and g.name in gates)
    return (g for g in groups if gates[g.name].weight.requires_grad)


def least_at(gated: GatedModule, prices: Prices, scores: Tensor, stops: Stops, floor: float = 0.0) -> Tensor:
    """Every group at its first stop that leaves `floor` of it; no branch that can go."""
    return _split(gated, prices, scores, stops, floor)[0]


def choose_at(
    gated: GatedModule,
    prices: Prices,
    scores: Tensor,
    stops: Stops,
    targets: Mapping[str, float],
    *,
    floor: float = 0.0,
    exactly: bool = True,
) -> tuple[Tensor, float]:
    """Close chunks in the order of their mean scores until every target is met; gives the gates, and the score reached.

    exactly: then open the best of the closed chunks that still fit, so that the budget is used up.
    """
    least, chunks = _split(gated, prices, scores, stops, floor)
    chunks.sort(key=lambda chunk: -chunk.score)

    def opened(count: int) -> Tensor:
        chosen = least.clone()
        for chunk in chunks[:count]:
            chosen[chunk.slots] = True
        return chosen

    if prices.met(opened(len(chunks)), targets):  # nothing to close, even where few channels take longer than many
        return opened(len(chunks)), -math.inf
    if not prices.met(least, targets):
        raise _cannot(prices, least, targets)
    low, high = 0, len(chunks)  # so many of the best fit
    while low < high:
        middle = (low + high + 1) // 2
        if prices.met(opened(middle), targets):
            low = middle
        else:
            high = middle - 1
    chosen = opened(low)
    reached = chunks[low].score if low < len(chunks) else -math.inf
    full: set[str] = set()  # a group that lacks a chunk must not get a later one
    for chunk in chunks[low:] if exactly else ():
        if chunk.group in full:
            continue
        chosen[chunk.slots] = True
        if not prices.met(chosen, targets):
            chosen[chunk.slots] = False
            full.add(chunk.group)
    return chosen, reached


def _split(
    gated: GatedModule, prices: Prices, scores: Tensor, stops: Stops, floor: float
) -> tuple[Tensor, list[Chunk]]:
    """What stays open in any case, and the chunks above it."""
    least = (torch.from_numpy(gated.open_slots()) & ~prices.movable).to(scores.device)
    chunks: list[Chunk] = []
    for group in _chunked(gated):
        own = torch.from_numpy(gated.gate_slots(group.name)).to(scores.device)
        order = own[scores[own].argsort(descending=True, stable=True)]
        wanted = min(len(own), max(1, math.ceil(floor * group.size)))
        counts = [n for n in stops[group.name] if n >= wanted] or stops[group.name][-1:]
        if group.is_switch:  # a branch may go as a whole
            counts = [0, *counts]
        least[order[: counts[0]]] = True
        for start, end in itertools.pairwise(counts):
            part = order[start:end]
            chunks.append(Chunk(float(scores[part].mean()), group.name, part))
    return least, chunks


def _cannot(prices: Prices, least: Tensor, targets: Mapping[str, float]) -> BudgetError:
    reached = {kind: prices.ratio(kind, least) for kind in targets}
    return BudgetError(
        "the budget cannot be met at the counts where groups may stop",
        expected=", ".join(f"{kind} of at least {ratio:.4f}" for kind, ratio in reached.items()),
        found=", ".join(f"{kind} {share:.1%}" for kind, share in targets.items()),
        fix="use a smaller round_to, if there is one, or a larger budget",
    )
