"""What a gated model costs: with the gates as they are, at least, and by each channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tgfx.budget import check_kind
from tgfx.errors import BudgetError
from tgfx.passes.cost import KINDS, MEASURED
from tgfx.passes.dead_branches import dead_branches, parameters_of
from tgfx.passes.survivors import Survivors
from tgfx.training.alternatives import cheapest_alternatives
from tgfx.training.vectors import held_slots

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


def kinds_of(gated: GatedModule) -> tuple[str, ...]:
    """Heads have a price where they are gated, and time where it was measured."""
    heads = any(group.kind == "head" for group in gated.facts.coupling.groups)
    counted = tuple(kind for kind in KINDS if kind != "heads" or heads)
    return (*counted, *gated.facts.cost.measured)


def known_kind(gated: GatedModule, kind: str) -> str:
    """`kind` itself, if this model has such a cost."""
    if check_kind(kind) in MEASURED and kind not in gated.kinds:
        raise BudgetError(
            f"no {kind} table is known",
            expected=f"a gated model that has been given one ({kind} is measured, not counted)",
            found="none (tables are not part of plans and state_dicts)",
            fix="gated.use_latency(tgfx.latency.measure(gated)), or a table read with tgfx.latency.read_csv",
        )
    if kind not in gated.kinds:
        raise BudgetError(
            "attention heads are not gated here",
            expected='a model gated with granularity="head" or ("channel", "head")',
            found=f"no gated head, granularity={gated.facts.granularity}",
            fix='tgfx.transform(model, granularity="head") says why if there are none',
        )
    return kind


def gone_at(gated: GatedModule, opened: np.ndarray) -> frozenset[str]:
    """Nodes and parameters of branches that disappear as a whole where only the slots `opened` are open."""
    facts = gated.facts
    if all(opened[g.start : g.start + g.size].any() for g in facts.coupling.groups if not g.can_be_empty):
        return frozenset()  # closed branches alone are in the cost's own terms
    key = opened.tobytes()
    if gated.__dict__.get("_last_gone", (None,))[0] != key:  # gates rarely move from one step to the next
        survivors = Survivors(facts.channels, facts.coupling, opened)
        dead = dead_branches(facts.source, facts.channels, survivors, facts.switches.closed(opened))
        gated.__dict__["_last_gone"] = (key, dead.nodes | parameters_of(facts.source, dead.nodes))
    return gated.__dict__["_last_gone"][1]


def marginal_costs(gated: GatedModule, kind: str) -> dict[str, Tensor]:
    """Per gate: the derivative of the cost by each of its channels."""
    bank = gated.bank().detach().requires_grad_()
    with torch.enable_grad():
        cost = gated.facts.cost.evaluate(kind, bank, gated._gone())
        (gradient,) = torch.autograd.grad(cost, bank)
    return {name: gradient[torch.from_numpy(gated.gate_slots(name))] for name in gated.gates}


def cheapest_cost(gated: GatedModule, kind: str) -> float:
    """With one channel per group, no branch, the cheapest alternatives; gates that are held count as they are."""
    held = held_slots(gated)
    least = held & torch.from_numpy(gated.open_slots())
    for group in gated.facts.coupling.groups:
        if group.name in gated.gates and group.kind != "layer" and not held[first := gated.gate_slots(group.name)[0]]:
            least[first] = True

    def price(opened: Tensor) -> float:
        bank = torch.cat([opened.double(), torch.ones(1, dtype=torch.float64)])
        return float(gated.facts.cost.evaluate(kind, bank, gone_at(gated, opened.numpy())))

    return price(cheapest_alternatives(gated, price, least))
