"""What became of a model in each runtime."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tgfx.report import render


@dataclass(frozen=True)
class RuntimeResult:
    """status: "ok", "differs", "failed" (does not load or run) or "skipped"; reason says more."""

    runtime: str
    status: str
    version: str = ""
    max_delta: float | None = None
    relative_delta: float | None = None
    ms: float | None = None
    reason: str = ""


@dataclass
class VerifyReport:
    """One file in several runtimes. reference: what all are compared with; ok: nothing that was tried went wrong."""

    path: Path
    reference: str
    shapes: dict[str, list[int]]
    tolerance: float
    results: list[RuntimeResult]

    @property
    def ok(self) -> bool:
        return all(result.status in ("ok", "skipped") for result in self.results)

    def __getitem__(self, runtime: str) -> RuntimeResult:
        return next(result for result in self.results if result.runtime == runtime)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path), "ok": self.ok}

    def __str__(self) -> str:
        table = Table(title=f"{self.path.name} against {self.reference}")
        for header in ("runtime", "version", "result", "max |delta|", "ms, 1 thread", ""):
            table.add_column(header, justify="right" if header.startswith(("max", "ms")) else "left", overflow="fold")
        for result in self.results:
            table.add_row(
                result.runtime,
                result.version,
                result.status,
                "" if result.max_delta is None else f"{result.max_delta:.1e}",
                "" if result.ms is None else f"{result.ms:.3f}",
                result.reason,
            )
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.shapes.items())
        return f"{render(table).rstrip()}\ninputs: {shapes}; tolerance {self.tolerance:g} of the largest entry"
