"""What the last weight that a budget has room for is worth, by curvature alone: from a sample of all weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.training.weight_evidence import WeightEvidence

if TYPE_CHECKING:
    from tgfx.weight.gated import WeightGatedModule

SAMPLE = 1 << 17  # enough to know the share of weights above a worth to 0.2% of all
WHOLE = 1 << 12  # of a weight with no more entries than this, all are looked at


@torch.no_grad()
def worth_at_threshold(
    gated: WeightGatedModule,
    evidence: Mapping[str, WeightEvidence],
    scales: Mapping[str, Tensor],
    targets: Mapping[str, float],
) -> float:
    """`scales`: one over the price of a weight's entries, by gate that is not held; it ranks what is worth as much."""
    room = {kind: share * gated.total(kind) - gated.fixed_cost(kind) for kind, share in targets.items()}
    share = min(1.0, SAMPLE / sum(gated.gates[name].weight.numel() for name in scales))
    generator = torch.Generator().manual_seed(0)  # the same weights each time, and no draw from the user's own numbers
    worths, ranks, costs = [], [], {kind: [] for kind in room}  # type: ignore[var-annotated]
    for name in scales:
        weight = gated.get_parameter(name).detach()
        index = _sample(weight.numel(), share, generator)
        stands_for = weight.numel() / len(index)
        places = torch.unravel_index(index.to(weight.device), weight.shape)
        worths.append(evidence[name].curvature_at(weight, places).cpu())
        ranks.append(worths[-1] * scales[name].expand(weight.shape)[places].cpu())
        for kind in room:
            price = gated.facts.cost.factors[kind][name].expand(weight.shape)
            each = price[tuple(place.to(price.device) for place in places)].double().cpu()
            costs[kind].append(each * stands_for)
    order = torch.cat(ranks).argsort(descending=True)
    fit = torch.ones(len(order), dtype=torch.bool)
    for kind, left in room.items():
        fit &= torch.cat(costs[kind])[order].cumsum(0) <= left
    last = min(int(fit.count_nonzero()), len(order) - 1)
    return float(torch.cat(worths)[order[last]])


def _sample(entries: int, share: float, generator: torch.Generator) -> Tensor:
    """Drawn, not every n-th: columns have a structure of their own, and equal steps may miss most of them."""
    if share == 1 or entries <= WHOLE:
        return torch.arange(entries)
    return torch.randint(entries, (max(WHOLE, math.ceil(share * entries)),), generator=generator)
