"""From a table to a kind of cost of a gated model."""

from __future__ import annotations

import torch

from tgfx.errors import GranularityError, InputError
from tgfx.gated import GatedModule
from tgfx.latency.table import LatencyTable
from tgfx.passes.lookup_cost import LookupCost
from tgfx.training.vectors import movable
from tgfx.weight.gated import WeightGatedModule

KIND = "latency"


def attach(gated: GatedModule, table: LatencyTable) -> GatedModule:
    """Let `table` price the layers of a gated model, which is returned: budgets may be in "latency" then.

    What the table's whole model takes beyond its layers (pooling, activations that are not fused, attention products)
    counts as a constant.
    """
    check_gated(gated)
    if not isinstance(table, LatencyTable):
        raise InputError("this is no latency table", expected="LatencyTable", found=type(table).__name__)
    cost = gated.facts.cost
    before = dict(cost.measured)
    try:
        found = cost.measure_by(KIND, table)
        _check_measured(gated, found, table)
        cost.measured[KIND] = found.with_constant(_constant(gated, table))
    except BaseException:
        cost.measured = before
        raise
    return gated


def check_gated(gated: object) -> None:
    if not isinstance(gated, GatedModule):
        raise InputError("this is not a gated model", expected="GatedModule", found=type(gated).__name__)
    if isinstance(gated, WeightGatedModule):
        raise GranularityError(
            "single zeros in weights do not make layers faster",
            expected='a model gated by channels, heads or layers, e.g. granularity="channel"',
            found='granularity="weight"',
        )


def all_there(gated: GatedModule) -> torch.Tensor:
    """The gate bank with everything open that can be; of a choice, what is chosen now."""
    opened = movable(gated) | torch.from_numpy(gated.open_slots())
    return torch.cat([opened.double(), torch.ones(1, dtype=torch.float64)])


def _constant(gated: GatedModule, table: LatencyTable) -> float:
    layers = float(gated.facts.cost.evaluate(KIND, all_there(gated)))
    return max(0.0, (table.whole or 0.0) - layers)


def _check_measured(gated: GatedModule, found: LookupCost, table: LatencyTable) -> None:
    """An axis that gates cut must have been measured at more than its full size."""
    cost = gated.facts.cost
    for call, lookup in zip(gated.facts.channels.layers, found.lookups, strict=True):
        surface = table.surface(call.shape)
        for axis, index in (("in", lookup.ins), ("out", lookup.outs)):
            gated_axis = any(cost.touches(index, group) for group in gated.facts.coupling.groups)
            if gated_axis and surface.measured_along(axis) < min(2, getattr(call.shape, f"steps_{axis}")):
                raise InputError(
                    "the latency table has one time only where gates can cut",
                    expected=f"times with fewer {axis}put channels",
                    found="the time with all of them",
                    where=f"{call.node}: {call.shape}",
                    fix="tgfx.latency.measure this model, with the same ignore and granularity",
                )
