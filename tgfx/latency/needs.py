"""Which layers of a gated model a table must know, and along which axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgfx.errors import GranularityError, InputError
from tgfx.gated import GatedModule
from tgfx.gated_check import check_gated
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import grid
from tgfx.latency.table import LatencyTable
from tgfx.weight.gated import WeightGatedModule


@dataclass(frozen=True)
class Need:
    """A layer shape, whether gates cut its input and its output channels, and a node that calls it."""

    shape: LayerShape
    cuts_in: bool
    cuts_out: bool
    node: str

    def points(self) -> list[tuple[int, int]]:
        return grid.points(self.shape, vary_in=self.cuts_in, vary_out=self.cuts_out)


def needs(gated: GatedModule) -> list[Need]:
    """Each layer shape once, in the order of the model."""
    check_timed(gated)
    coupling = gated.facts.coupling
    found: dict[LayerShape, Need] = {}

    def is_cut(ids: torch.Tensor) -> bool:
        return bool((coupling.slots_of(ids.numpy()) != coupling.slots).any())

    for call in gated.facts.channels.layers:
        before = found.get(call.shape, Need(call.shape, False, False, call.node))
        cuts_in, cuts_out = before.cuts_in or is_cut(call.ins), before.cuts_out or is_cut(call.outs)
        found[call.shape] = Need(call.shape, cuts_in, cuts_out, before.node)
    return list(found.values())


def check_covers(gated: GatedModule, table: LatencyTable) -> None:
    """Refuse a table that does not know a layer, or knows only its full size where gates can cut."""
    for need in needs(gated):
        surface = table.surface(need.shape)
        for axis, cuts in (("in", need.cuts_in), ("out", need.cuts_out)):
            if cuts and surface.measured_along(axis) < min(2, getattr(need.shape, f"steps_{axis}")):
                raise InputError(
                    "the latency table has one time only where gates can cut",
                    expected=f"times with fewer {axis}put channels",
                    found="the time with all of them",
                    where=f"{need.node}: {need.shape}",
                    fix="tgfx.latency.measure this model, with the same ignore and granularity",
                )


def check_timed(gated: object) -> None:
    check_gated(gated, "has layers to time")
    if isinstance(gated, WeightGatedModule):
        raise GranularityError(
            "single zeros in weights do not make layers faster",
            expected='a model gated by channels, heads or layers, e.g. granularity="channel"',
            found='granularity="weight"',
        )
    if isinstance(gated, GatedModule) and gated.facts.channels.taps:
        raise GranularityError(
            "a layer that has lost taps is another layer, whose time no table over numbers of channels tells",
            expected='a model gated by channels, heads or layers, e.g. granularity="channel"',
            found='granularity="tap"',
        )
