"""Two ONNX files side by side."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tgfx.onnx_export.files import random_feeds, read_model
from tgfx.onnx_export.flops import flops
from tgfx.onnx_export.graph_size import graph_size
from tgfx.onnx_export.measuring import alternating
from tgfx.onnx_export.parity import delta
from tgfx.onnx_export.session import Feeds, open_session, run
from tgfx.report import render


@dataclass(frozen=True)
class OnnxFigures:
    path: str
    nodes: int
    initializers: int
    parameters: int
    bytes: int
    flops: int | None
    ms: float | None


@dataclass(frozen=True)
class OnnxComparison:
    """max_delta: per output that both have under the same name and shape, on the same random inputs."""

    first: OnnxFigures
    second: OnnxFigures
    max_delta: dict[str, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        table = Table()
        for header in ("", Path(self.first.path).name, Path(self.second.path).name, "second / first"):
            table.add_column(header, justify="right" if header else "left")
        for key, title in _ROWS.items():
            a, b = getattr(self.first, key), getattr(self.second, key)
            shown = [_shown(value) for value in (a, b)]
            table.add_row(title, *shown, f"{b / a:.3f}" if a and b is not None else "")
        lines = [render(table).rstrip()]
        lines += [f"max |delta| of {name}: {value:.3g}" for name, value in self.max_delta.items()]
        return "\n".join([*lines, *([self.note] if self.note else [])])


_ROWS = {
    "nodes": "nodes",
    "initializers": "initialisers",
    "parameters": "numbers in initialisers",
    "bytes": "bytes",
    "flops": "FLOPs per sample",
    "ms": "ms, 1 thread",
}


def compare_onnx(first: str | os.PathLike[str], second: str | os.PathLike[str], *, seed: int = 0) -> OnnxComparison:
    """Sizes, arithmetic, milliseconds (taking turns) and how far the outputs are apart."""
    models = [read_model(first), read_model(second)]
    feeds = random_feeds(models[0], seed=seed)
    sessions = [open_session(Path(first)), open_session(Path(second))]
    try:
        answers = [run(session, feeds) for session in sessions]
    except Exception as error:
        note = f"not run together: {(str(error).strip().splitlines() or [''])[0]}"
        figures = [_figures(path, model, None) for path, model in zip((first, second), models, strict=True)]
        return OnnxComparison(figures[0], figures[1], {}, note)
    times = alternating([_caller(session, feeds) for session in sessions])
    figures = [_figures(p, m, t) for p, m, t in zip((first, second), models, times, strict=True)]
    gaps = {name: delta(value, answers[1][name]).largest for name, value in answers[0].items() if name in answers[1]}
    return OnnxComparison(figures[0], figures[1], gaps, "" if gaps else "no output has the same name in both")


def _caller(session: Any, feeds: Feeds) -> Any:
    return lambda: run(session, feeds)


def _figures(path: str | os.PathLike[str], model: Any, ms: float | None) -> OnnxFigures:
    size = graph_size(model, Path(path).stat().st_size)
    return OnnxFigures(str(path), size.nodes, size.initializers, size.parameters, size.bytes, flops(model), ms)


def _shown(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
