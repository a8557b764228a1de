"""round_to: the counts of open gates at which the layers' sizes are multiples of a number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tgfx.errors import GranularityError, InputError
from tgfx.passes.couple import Group

if TYPE_CHECKING:
    from tgfx.gated import Facts, GatedModule

TAP_STEPS = 64


def checked_multiple(multiple: Any) -> int:
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise InputError("round_to must be a positive whole number", expected="e.g. 8", found=repr(multiple))
    return multiple


def refuse_rounding(round_to: int | None) -> None:
    """Of a model gated weight by weight."""
    if round_to is not None:
        raise GranularityError(
            "single weights are not counted in multiples",
            expected="round_to=None, or a model gated by channels or heads",
            found=f'round_to={round_to!r} and granularity="weight"',
        )


def rounded_counts(gated: GatedModule, group: Group, multiple: int) -> list[int]:
    """Counts of a group, rising, at which its sizes are multiples, as far as the group still goes.

    Taps are no size of a layer: they close in small steps, whatever the multiple.
    """
    if group.kind == "tap":
        return reachable(gated, group, range(1, group.size + 1, -(-group.size // TAP_STEPS)))
    step = multiple // math.gcd(multiple, rows_per_gate(gated.facts, group))
    return reachable(gated, group, range(step, group.size + 1, step))


def reachable(gated: GatedModule, group: Group, counts: Iterable[int]) -> list[int]:
    """Those of these counts that can still be had after compact_, and the whole group where it is still whole.

    A part that compact_ happened to leave is no better a size than any other, unless there is nothing else.
    """
    left = len(gated.gate_slots(group.name))
    found = {n for n in counts if n <= left} | ({left} if left == group.size else set())
    return sorted(found) or [left]


def rows_per_gate(facts: Facts, group: Group) -> int:
    """How many rows or columns of a layer's weight go with one gate: a head is a block of them, a channel counts as 1.

    Where one channel means several rows they lie apart, one to each head or group of a convolution, and what matters
    there is how many each of these has.
    """
    if group.kind != "head":
        return 1
    counts: list[int] = []
    for axis in group.members:
        ids = facts.channels.params.get(axis.name)
        if ids is None or axis.name not in facts.channels.channels:
            continue  # a table of position biases has one entry for a head, but no kernel works in blocks of that
        for layer in ids.layers:
            if layer.shape[axis.axis] > 1:
                slots = facts.coupling.slots_of(layer.numpy()).reshape(-1)
                own = slots[(slots >= group.start) & (slots < group.start + group.size)]
                counts.extend(np.unique(own, return_counts=True)[1].tolist())
    return math.gcd(*counts) or 1
