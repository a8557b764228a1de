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
    """Values at any counts (linear between whole ones), and slopes along fast counts, for arrays of counts."""

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
        return self._product(self._a, self._b, *self._coordinates(channels_in, channels_out))

    def slopes(self, channels_in: np.ndarray, channels_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ms per input channel and per output channel, on the way here from half as many; always above 0.

        Over half the way, since a single step is as much noise as slope.
        """
        u, v = self._coordinates(channels_in, channels_out)
        a, b = self._smooth
        here = self._product(a, b, u, v)
        half_u, half_v = np.maximum(u / 2, 0.5), np.maximum(v / 2, 0.5)
        by_in = np.maximum((here - self._product(a, b, u / 2, v)) / half_u, LEAST * here / half_u) / self.shape.unit_in
        by_out = np.maximum((here - self._product(a, b, u, v / 2)) / half_v, LEAST * here / half_v)
        return by_in, np.zeros_like(by_in) if self._tied else by_out / self.shape.unit_out

    def _product(self, a: np.ndarray, b: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return _between(a, u) * _between(b, v) / self.whole * self._corrected(u, v)

    def _coordinates(self, channels_in: np.ndarray, channels_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u = np.clip(np.asarray(channels_in, dtype=np.float64) / self.shape.unit_in, 0, self.shape.steps_in)
        v = np.clip(np.asarray(channels_out, dtype=np.float64) / self.shape.unit_out, 0, self.shape.steps_out)
        return u, np.where(u > 0, self.shape.steps_out, 0.0) if self._tied else v

    def _corrected(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """c: linear between the grid's points, constant below them."""
        x, s = _place(self._grid_in, u)
        y, t = _place(self._grid_out, v)
        x1, y1 = np.minimum(x + 1, len(self._grid_in) - 1), np.minimum(y + 1, len(self._grid_out) - 1)
        low = self._c[x, y] + t * (self._c[x, y1] - self._c[x, y])
        high = self._c[x1, y] + t * (self._c[x1, y1] - self._c[x1, y])
        return low + s * (high - low)


def _between(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.interp(at, np.arange(len(values)), values)


def _place(grid: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interval of the grid, and the position in it (0 to 1)."""
    index = np.clip(np.searchsorted(grid, at, side="left") - 1, 0, max(len(grid) - 2, 0))
    width = np.maximum(grid[np.minimum(index + 1, len(grid) - 1)] - grid[index], 1)
    return index, np.clip((at - grid[index]) / width, 0, 1)
