"""The end of training: land exactly on the budget, cut, and say what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table
from torch import Tensor, fx

from tgfx.budget import Budget
from tgfx.gated_check import check_gated
from tgfx.report import FLOPS_NOTE, amount, render
from tgfx.rounding import checked_multiple
from tgfx.sharding import refuse_sharded
from tgfx.shrinking import shrink
from tgfx.training.alternatives import unaffordable
from tgfx.training.exchange import exchange
from tgfx.training.feasible import check_feasible, check_sign_decides
from tgfx.training.selection import Prices, all_open, change_alternatives_, close_worst, fewest, land, protected
from tgfx.training.stops import choose_at, stops_for
from tgfx.training.vectors import gate_weights, set_gate_weights_
from tgfx.training.weight_landing import check_weight_budget, shift_to_
from tgfx.verify import eval_mode
from tgfx.weight.gated import WeightGatedModule

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


@dataclass(frozen=True)
class Finished:
    """The shrunk model and what it costs; `print` it."""

    model: fx.GraphModule
    budget: Budget
    before: dict[str, float]
    after: dict[str, float]
    moved: int

    def ratio(self, kind: str) -> float:
        return self.after[kind] / self.before[kind]

    def __str__(self) -> str:
        table = Table(title="finished", title_justify="left")
        for name in ("cost", "whole", "kept", "ratio", "budget"):
            table.add_column(name, justify="left" if name == "cost" else "right")
        for kind, whole in self.before.items():
            wanted = f"{self.budget[kind]:.1%}" if kind in self.budget else ""
            amounts = (amount(kind, whole), amount(kind, self.after[kind]))
            table.add_row(kind, *amounts, f"{self.ratio(kind):.2%}", wanted)
        return render(table) + f"{FLOPS_NOTE}\ngates moved to land on the budget: {self.moved}\n"


def finish(
    gated: GatedModule,
    budget: Mapping[str, float] | None = None,
    *,
    round_to: int | None = None,
    verify: bool = True,
    **shares: float,
) -> Finished:
    """Nudge the gates to the budget, shrink, and report: `tgfx.finish(gated, flops=0.5).model`.

    Gates are closed, or opened, in the order of their latent weights until the budget is used up and not exceeded.
    round_to: group sizes become multiples of it (or stay whole), still within the budget; of heads, their rows are
    counted. Without, where the latency is in the budget, group sizes are those that its table shows to be fast. Choices
    stay as they are where the budget allows it; else the least sure ones change to cheaper alternatives. On an error
    the gates are as they were.
    Gates whose weights ask for no gradient (requires_grad_(False)) stay as they are.
    """
    check_gated(gated, "can be finished")
    wanted = Budget.of(budget, **shares)
    refuse_sharded(gated, "finishing")
    if isinstance(gated, WeightGatedModule):
        return _finish_weights(gated, wanted, round_to, verify)
    prices = Prices(gated)
    scores = gate_weights(gated).double().cpu()
    opened = torch.from_numpy(gated.open_slots())
    check_feasible(gated, wanted)
    stops = stops_for(gated, wanted, None if round_to is None else checked_multiple(round_to))
    saved = gate_weights(gated)
    try:
        change_alternatives_(gated, prices, fewest(gated, prices, 0.0, stops, scores), wanted)
        if stops is None:
            chosen = _nudged(gated, prices, scores, wanted)
        else:
            chosen, _ = choose_at(gated, prices, scores, stops, wanted)
        moved = int((chosen != opened).sum())
        _set_open(gated, chosen)
        model = shrink(gated, verify=verify)
    except BaseException:
        set_gate_weights_(gated, saved, choices=True)
        raise
    before = {kind: gated.total(kind) for kind in gated.kinds}
    gone = gated._gone()
    after = {kind: prices.cost(kind, chosen, gone) for kind in before}  # gated.cost is not quite that in train mode
    return Finished(model, wanted, before, after, moved)


def _finish_weights(gated: WeightGatedModule, wanted: Budget, round_to: int | None, verify: bool) -> Finished:
    check_sign_decides(gated)
    check_weight_budget(gated, wanted)
    before = {name: gate.weight.detach().clone() for name, gate in gated.gates.items()}
    opened = {name: gate.is_open() for name, gate in gated.gates.items()}
    try:
        shift_to_(gated, wanted)
        model = shrink(gated, round_to=round_to, verify=verify)
    except BaseException:
        for name, gate in gated.gates.items():
            gate.weight.data.copy_(before[name])
        raise
    moved = sum(int((opened[name] != gate.is_open()).sum()) for name, gate in gated.gates.items())
    with eval_mode(gated):  # exactly 0 or 1 only there
        after = {kind: gated.cost(kind).item() for kind in gated.kinds}
    return Finished(model, wanted, {kind: gated.total(kind) for kind in gated.kinds}, after, moved)


def _nudged(gated: GatedModule, prices: Prices, scores: Tensor, budget: Budget) -> Tensor:
    opened = torch.from_numpy(gated.open_slots())
    met = prices.met(opened, budget)
    keep = opened if met else protected(gated, scores, 0.0)
    chosen, _ = close_worst(prices, scores, all_open(gated), keep, budget)
    chosen = land(prices, chosen, scores, budget)
    if not met and prices.met(chosen, budget):
        floor = protected(gated, scores.where(chosen, -math.inf), 0.0)
        chosen = exchange(gated, prices, chosen, scores, floor, budget)
    if not prices.met(chosen, budget):
        raise unaffordable(prices, chosen, budget)
    return chosen


def _set_open(gated: GatedModule, chosen: Tensor) -> None:
    for name, gate in gated.gates.items():
        own = chosen[torch.from_numpy(gated.gate_slots(name))].to(gate.weight.device)
        if not torch.equal(gate.is_open(), own):
            gate.set_open_(own)
