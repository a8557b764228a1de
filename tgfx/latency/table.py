"""Measured times of layers, and what follows from them for any number of channels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tgfx.errors import InputError
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import csv_file
from tgfx.latency.surface import Surface


@dataclass(frozen=True)
class LatencyTable:
    """ms of layers by (input channels, output channels); hand it to `gated.use_latency`.

    points: per layer shape, what was measured. whole: ms of the model with all gates open; what `scale` times the sum
    of its layers does not explain counts as a constant. about: where the figures come from.
    """

    points: Mapping[LayerShape, Mapping[tuple[int, int], float]]
    whole: float | None = None
    scale: float = 1.0
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("whole", 1.0 if self.whole is None else self.whole), ("scale", self.scale)):
            if not 0 < value < float("inf"):
                raise InputError(f"{name} is out of range", expected="a number above 0", found=repr(value))
        for shape, times in self.points.items():
            if (shape.channels_in, shape.channels_out) not in times:
                raise InputError(
                    "a layer has no time with all its channels",
                    expected=f"one for {shape.channels_in} input and {shape.channels_out} output channels",
                    found=f"{len(times)} other(s)",
                    where=str(shape),
                )
            for (ins, outs), time in times.items():
                if not 0 < time < float("inf"):
                    raise InputError(
                        "this is no time", expected="ms above 0", found=repr(time), where=f"{shape}, {ins}->{outs}"
                    )

    def lookup(self, shape: LayerShape, channels_in: int, channels_out: int) -> float:
        """ms of a layer with these numbers of channels: as measured, or interpolated (tgfx.latency.surface)."""
        return float(self.surface(shape).value(channels_in, channels_out))  # type: ignore[arg-type]

    def surface(self, shape: LayerShape) -> Surface:
        if shape not in self.points:
            raise InputError(
                "the latency table does not know a layer of the model",
                expected=f"one of {len(self.points)} layers, e.g. {next(iter(self.points), 'none')}",
                found=str(shape),
                fix="tgfx.latency.measure this model, with the same example size",
            )
        if shape not in self._surfaces:
            self._surfaces[shape] = Surface(shape, self.points[shape])
        return self._surfaces[shape]

    @cached_property
    def _surfaces(self) -> dict[LayerShape, Surface]:
        return {}

    @cached_property
    def digest(self) -> str:
        """Equal for equal figures only."""
        rows = sorted((repr(shape), sorted(times.items())) for shape, times in self.points.items())
        return hashlib.sha256(repr((rows, self.whole, self.scale)).encode()).hexdigest()

    def to_csv(self, path: str | os.PathLike[str], *, blank: bool = False) -> Path:
        """Write the rows that `tgfx.latency.read_csv` reads; blank=True leaves the times to be filled in elsewhere."""
        return csv_file.write(Path(path), self.points, self.whole, self.scale, blank=blank)


def read_csv(path: str | os.PathLike[str]) -> LatencyTable:
    """A table from a CSV file, e.g. measured on a phone. The columns are explained in tgfx/latency/csv_file.py."""
    points, whole, scale = csv_file.read(Path(path))
    return LatencyTable(points, whole, scale, {"runtime": "csv", "file": Path(path).name})
