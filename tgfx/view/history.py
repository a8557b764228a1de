"""A training history for the page: columns of numbers, and the open gates of every group over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tgfx.errors import InputError
from tgfx.training.fit import FitResult
from tgfx.training.history import History

POINTS = 800  # a curve is not drawn finer than this


def history_data(history: FitResult | History | None, points: int = POINTS) -> dict[str, Any] | None:
    """points: how many rows are left at most."""
    if history is None:
        return None
    rows = history.history if isinstance(history, FitResult) else history
    if not isinstance(rows, History):
        raise InputError("this is no training history", expected="what tgfx.fit returned", found=type(history).__name__)
    chosen = thinned(rows.rows, points)
    numbers = [name for name in rows.columns if name not in ("epoch", "phase")]
    kept = thinned(rows.kept, points)
    return {
        "columns": {name: [_number(row.get(name)) for row in chosen] for name in numbers},
        "phase": [str(row.get("phase", "")) for row in chosen],
        "groups": list(rows.groups),
        "kept": {"step": [step for step, _ in kept], "open": [list(counts) for _, counts in kept]},
    }


def thinned(rows: Sequence[Any], points: int) -> list[Any]:
    """Every n-th row, always with the last."""
    if len(rows) <= points:
        return list(rows)
    every = math.ceil(len(rows) / points)
    return [*rows[:-1:every], rows[-1]]


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None
