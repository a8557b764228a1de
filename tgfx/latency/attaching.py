"""From a table to a kind of cost of a gated model."""

from __future__ import annotations

import torch

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.latency.needs import check_covers, check_timed
from tgfx.latency.table import LatencyTable
from tgfx.training.selection import all_open

KIND = "latency"


def attach(gated: GatedModule, table: LatencyTable) -> GatedModule:
    """Let `table` price the layers of a gated model, which is returned: budgets may be in "latency" then.

    The latency of the model is the sum of its layers, times the table's scale, plus a constant: what the table's whole
    model takes beyond that (pooling, attention products, the call itself).
    """
    check_timed(gated)
    if not isinstance(table, LatencyTable):
        raise InputError("this is no latency table", expected="LatencyTable", found=type(table).__name__)
    check_covers(gated, table)
    cost = gated.facts.cost
    found = cost.measure_by(KIND, table)
    whole = torch.cat([all_open(gated).double(), torch.ones(1, dtype=torch.float64)])  # of a choice, what is chosen
    layers = float(cost.evaluate(KIND, whole))
    cost.measured[KIND] = found.in_model(table.scale, max(0.0, (table.whole or 0.0) - table.scale * layers))
    return gated
