"""Latency tables that a formula fills instead of a clock."""

from __future__ import annotations

from collections.abc import Callable

import tgfx
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import LatencyTable
from tgfx.latency.needs import needs

BLOCK = 8
Formula = Callable[[LayerShape, int, int], float]


def blocks(count: int) -> int:
    return -(-count // BLOCK)


def in_blocks(shape: LayerShape, channels_in: int, channels_out: int) -> float:
    """Whole blocks of 8 are paid for, and half as much again where the input is not in whole blocks."""
    off = 1.5 if channels_in % BLOCK and channels_in > BLOCK else 1.0
    area = 1.0
    for size in (*shape.space, *shape.kernel):
        area *= size
    if shape.grouping == "within":
        return 1e-4 * area * blocks(channels_in) * off
    return 1e-4 * area * blocks(channels_in) * blocks(channels_out) * off


def smooth(shape: LayerShape, channels_in: int, channels_out: int) -> float:
    return 1e-4 * (100 + channels_in * channels_out)


def table_for(gated: tgfx.GatedModule, formula: Formula = in_blocks, whole: float | None = None) -> LatencyTable:
    points = {n.shape: {counts: formula(n.shape, *counts) for counts in n.points()} for n in needs(gated)}
    return LatencyTable(points, whole)
