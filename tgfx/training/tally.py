"""Numbers about the gates of any kind of gated model, for logs and displays."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tgfx.gated import GatedModule
from tgfx.training.selection import Prices
from tgfx.weight.gated import WeightGatedModule


def gate_count(gated: GatedModule) -> int:
    """Gates that the model had when it was transformed."""
    return sum(group.size for group in gated.groups if group.frozen is None)


def open_counts(gated: GatedModule) -> list[int]:
    """Open gates of each group, 0 where compact_ has removed all."""
    gates = gated.gates
    names = [group.name for group in gated.groups if group.frozen is None]
    return [gates[name].open_count() if name in gates else 0 for name in names]


def weight_count(gated: GatedModule) -> int:
    """Numbers that are trained, or frozen, as they are now; those of the gates not counted."""
    gates = {id(gate.weight) for gate in gated.gates.values()}
    return sum(p.numel() for p in gated.parameters() if id(p) not in gates)


def exact_ratios(gated: GatedModule, kinds: Iterable[str]) -> dict[str, float]:
    """At gates of exactly 0 or 1, also in train mode (there a weight's gates are within 1/M of that)."""
    if isinstance(gated, WeightGatedModule):
        return {kind: gated.ratio(kind).item() for kind in kinds}
    opened, prices = torch.from_numpy(gated.open_slots()), Prices(gated)
    return {kind: prices.ratio(kind, opened) for kind in kinds}
