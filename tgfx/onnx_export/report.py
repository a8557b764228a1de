"""What an export came to, for people (`print`) and for machines (`to_dict`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from tgfx.onnx_export.graph_size import GraphSize
from tgfx.onnx_export.measuring import Timing
from tgfx.report import render


@dataclass
class OnnxReport:
    """One export.

    sizes: "written" is the file; "exported" what torch gave before simplifying; "original" the model before the cut,
    where it is known. max_delta: per output, the largest |ONNX Runtime - torch| over everything in `checked`.
    """

    path: Path
    model: str
    opset: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    sizes: dict[str, GraphSize]
    simplified_by: str
    max_delta: dict[str, float]
    checked: list[str]
    timings: list[Timing] = field(default_factory=list)
    profile: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ort_path: Path | None = None

    @property
    def nodes(self) -> int:
        return self.sizes["written"].nodes

    @property
    def initializers(self) -> int:
        return self.sizes["written"].initializers

    @property
    def bytes(self) -> int:
        return self.sizes["written"].bytes

    @property
    def ops(self) -> dict[str, int]:
        return self.sizes["written"].ops

    def to_dict(self) -> dict[str, Any]:
        entries = dataclasses.asdict(self)
        entries["path"] = str(self.path)
        entries["ort_path"] = None if self.ort_path is None else str(self.ort_path)
        return entries

    def __str__(self) -> str:
        columns = [name for name in ("original", "exported", "written") if name in self.sizes]
        table = Table(title=f"{self.model}: {self.path.name}, opset {self.opset}")
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for title, key in (("nodes", "nodes"), ("initialisers", "initializers"), ("bytes", "bytes")):
            table.add_row(title, *(f"{getattr(self.sizes[column], key):,}" for column in columns))
        for timing in self.timings:
            cells = {"written": f"{timing.compact:.3f}"}
            if timing.original is not None:
                cells["original"] = f"{timing.original:.3f}"
            title = f"ms, {timing.threads} thread{'s' if timing.threads > 1 else ''}"
            table.add_row(title, *(cells.get(column, "") for column in columns))
        lines = [render(table).rstrip()]
        lines += [f"   inputs: {_shapes(self.inputs)}", f"  outputs: {_shapes(self.outputs)}"]
        lines.append("operators: " + ", ".join(f"{name} {count}" for name, count in self.ops.items()))
        worst = ", ".join(f"{name} {value:.1e}" for name, value in self.max_delta.items())
        lines.append(f"   parity: max |ONNX Runtime - torch| {worst}; at {'; '.join(self.checked)}")
        lines += [f"     note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # notebooks
        printer.text(str(self))


def _shapes(values: dict[str, tuple[int | str, ...]]) -> str:
    return ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in values.items())


def declared_shapes(values: Any) -> dict[str, tuple[int | str, ...]]:
    """Name -> sizes of graph inputs or outputs; free ones by name."""
    return {
        value.name: tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in values
    }
