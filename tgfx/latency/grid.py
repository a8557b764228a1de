"""At which channel counts a layer is measured."""

from __future__ import annotations

from tgfx.ir.layer_shape import LayerShape
from tgfx.latency.profile import PERIOD

ALL = 2 * PERIOD + PERIOD // 2  # up to so many channels every count is measured
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of each axis, where both are cut
WIDE = 16 * PERIOD  # from so many on, the pattern of residues is measured at two places


def counts(size: int) -> list[int]:
    """Along one axis: few whole blocks, evenly spread, and every residue at one or two places; 1 and `size` too."""
    if size <= ALL:
        return list(range(1, size + 1))
    blocks = {_block(size * share / 8, size) for share in range(1, 8)} | {PERIOD, size}
    windows = (size / 4, 3 * size / 4) if size >= WIDE else (size / 2,)
    tops = [_block(window, size) for window in windows]
    off = {top - r for top in tops for r in range(PERIOD) if top - r > 0}
    return sorted(blocks | off | {1, PERIOD // 2})


def points(shape: LayerShape, *, vary_in: bool, vary_out: bool) -> list[tuple[int, int]]:
    """(input channels, output channels) to measure, all of them last; an axis that does not vary stays whole."""
    last_in, last_out = shape.steps_in, shape.steps_out
    found = {(last_in, last_out)}
    if shape.grouping == "within":
        found |= {(u, u) for u in counts(last_in)} if vary_in or vary_out else set()
    else:
        found |= {(u, last_out) for u in counts(last_in)} if vary_in else set()
        found |= {(last_in, v) for v in counts(last_out)} if vary_out else set()
        if vary_in and vary_out:
            found |= {(u, v) for u in _coarse(last_in) for v in _coarse(last_out)}
    return sorted((u * shape.unit_in, v * shape.unit_out) for u, v in found)


def _coarse(size: int) -> set[int]:
    return {_block(size * share, size) for share in SHARES}


def _block(count: float, size: int) -> int:
    """The nearest whole number of blocks, smaller ones in narrow layers; at least one."""
    block = next((b for b in (PERIOD, PERIOD // 2, PERIOD // 4) if size >= 4 * b), 1)
    return min(size, max(block, round(count / block) * block))
