"""Time of one layer against its numbers of input and output channels.

    t(i, o) = a(i) * b(o) / t(I, O) * c(i, o)

a is measured at all O output channels, b at all I input channels, both with their steps (tgfx.latency.profile). c, how
far that product is off, is measured on a coarse grid of whole blocks and linear between. So steps along one axis are
assumed to be the same share of the time whatever the other axis is; measured points are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tgfx.ir.fast_counts import smoothed
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency.profile import filled

Points = Mapping[tuple[int, int], float]  # (input channels, output channels) -> ms
LEAST = 0.01  # share of the mean price of a channel that each is taken to cost at least


class Surface:
    """Values at any counts (linear between whole ones), and slopes along fast counts; arrays in, arrays out."""

    def __init__(self, shape: LayerShape, points: Points) -> None:
        self.shape = shape
        self.whole = points[shape.channels_in, shape.channels_out]
        last_in, last_out = shape.steps_in, shape.steps_out
        steps = {(i // shape.unit_in, o // shape.unit_out): time for (i, o), time in points.items()}
        self.along_in = {u: time for (u, v), time in steps.items() if v == last_out or self._tied}
        self.along_out = {v: time for (u, v), time in steps.items() if u == last_in and not self._tied}
        self._a = filled(self.along_in, last_in)
        self._b = np.full(last_out + 1, self.whole) if self._tied else filled(self.along_out, last_out)
        inner = {} if self._tied else {(u, v): t for (u, v), t in steps.items() if u < last_in and v < last_out}
        self._grid_in = np.array([*sorted({u for u, _ in inner}), last_in])
        self._grid_out = np.array([*sorted({v for _, v in inner}), last_out])
        self._c = self._correction(inner)

    @property
    def _tied(self) -> bool:
        """Whether output channels go with input channels (depthwise convolutions): one number says it all."""
        return self.shape.grouping == "within"

    def measured_along(self, axis: str) -> int:
        """At how many counts of one axis ("in" or "out") there are measurements."""
        return len(self.along_in if axis == "in" or self._tied else self.along_out)

    def _correction(self, inner: Mapping[tuple[int, int], float]) -> np.ndarray:
        c = np.full((len(self._grid_in), len(self._grid_out)), np.nan)
        c[-1, :] = c[:, -1] = 1.0
        for x, u in enumerate(self._grid_in[:-1]):
            for y, v in enumerate(self._grid_out[:-1]):
                if (u, v) in inner:
                    c[x, y] = inner[u, v] * self.whole / (self._a[u] * self._b[v])
        for y in range(c.shape[1]):  # a hole in the grid of a user's table
            holes = np.isnan(c[:, y])
            c[holes, y] = np.interp(self._grid_in[holes], self._grid_in[~holes], c[~holes, y])
        return c

    @cached_property
    def _smooth(self) -> tuple[np.ndarray, np.ndarray]:
        return smoothed(self._a), np.full_like(self._b, self.whole) if self._tied else smoothed(self._b)

    def value(self, channels_in: np.ndarray, channels_out: np.ndarray) -> np.ndarray:
        u, v = self._coordinates(channels_in, channels_out)
        c, _, _ = self._corrected(u, v)
        return _between(self._a, u) * _between(self._b, v) / self.whole * c

    def slopes(self, channels_in: np.ndarray, channels_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ms for one more input channel and one more output channel, always above 0."""
        u, v = self._coordinates(channels_in, channels_out)
        a, b = self._smooth
        c, by_u, by_v = self._corrected(u, v)
        at_a, at_b = _between(a, u), _between(b, v)
        value = at_a * at_b / self.whole
        in_slope = (_slope(a, u) * at_b / self.whole * c + value * by_u) / self.shape.unit_in
        if self._tied:
            return np.maximum(in_slope, LEAST * value / np.maximum(channels_in, 1)), np.zeros_like(in_slope)
        out_slope = (_slope(b, v) * at_a / self.whole * c + value * by_v) / self.shape.unit_out
        least = LEAST * value * c
        return (
            np.maximum(in_slope, least / np.maximum(channels_in, 1)),
            np.maximum(out_slope, least / np.maximum(channels_out, 1)),
        )

    def _coordinates(self, channels_in: np.ndarray, channels_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u = np.clip(np.asarray(channels_in, dtype=np.float64) / self.shape.unit_in, 0, self.shape.steps_in)
        v = np.clip(np.asarray(channels_out, dtype=np.float64) / self.shape.unit_out, 0, self.shape.steps_out)
        return u, np.where(u > 0, self.shape.steps_out, 0.0) if self._tied else v

    def _corrected(self, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """c and its derivatives by u and v."""
        x, s, by_s = _place(self._grid_in, u)
        y, t, by_t = _place(self._grid_out, v)
        x1, y1 = np.minimum(x + 1, len(self._grid_in) - 1), np.minimum(y + 1, len(self._grid_out) - 1)
        c00, c01, c10, c11 = self._c[x, y], self._c[x, y1], self._c[x1, y], self._c[x1, y1]
        low, high = c00 + t * (c01 - c00), c10 + t * (c11 - c10)
        by_v = ((1 - s) * (c01 - c00) + s * (c11 - c10)) * by_t
        return low + s * (high - low), (high - low) * by_s, by_v


def _between(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.interp(at, np.arange(len(values)), values)


def _slope(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Of the step up to this count (gates in training are off by a trifle, which is not the next step)."""
    above = np.clip(np.ceil(at - 0.01), 1, len(values) - 1).astype(np.int64)
    return values[above] - values[above - 1]


def _place(grid: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interval of the grid, position in it (0 to 1), and how that changes with `at`; constant below the grid."""
    index = np.clip(np.searchsorted(grid, at, side="left") - 1, 0, max(len(grid) - 2, 0))
    width = np.maximum(grid[np.minimum(index + 1, len(grid) - 1)] - grid[index], 1)
    position = (at - grid[index]) / width
    inside = (position > 0) & (position <= 1)
    return index, np.clip(position, 0, 1), np.where(inside, 1 / width, 0.0)
