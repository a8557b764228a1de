"""What a variant with smaller numbers costs in accuracy, and what it gains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from tgfx.onnx_export.measuring import Timing
from tgfx.report import render


@dataclass(frozen=True)
class Closeness:
    """One output of the variant against the float32 model's. top1: share of rows with the same largest entry."""

    max_delta: float
    mean_delta: float
    top1: float | None


@dataclass
class VariantReport:
    """A variant of a file: sizes, times (`original` is float32) and how near its answers are, over `samples` rows."""

    path: Path
    kind: str
    bytes_before: int
    bytes_after: int
    outputs: dict[str, Closeness]
    samples: int
    timings: list[Timing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        table = Table(title=f"{self.path.name}: {self.kind}")
        for header in ("output", "max |delta|", "mean |delta|", "top-1 agreement"):
            table.add_column(header, justify="left" if header == "output" else "right")
        for name, near in self.outputs.items():
            agreement = "" if near.top1 is None else f"{near.top1:.2%}"
            table.add_row(name, f"{near.max_delta:.3g}", f"{near.mean_delta:.3g}", agreement)
        lines = [render(table).rstrip(), f"over {self.samples} samples"]
        share = self.bytes_after / self.bytes_before
        lines.append(f"{self.bytes_after:,} of {self.bytes_before:,} bytes ({share:.1%})")
        for timing in self.timings:
            lines.append(f"{timing.compact:.3f} ms, float32 {timing.original:.3f} ms at {timing.threads} thread(s)")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
