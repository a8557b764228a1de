"""Two results side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Largest difference that counts as rounding, relative to the largest entry. Kernels sum in another order, which is
# some 1e-6 in float32; a wrong node is off by orders of magnitude more.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Delta:
    """How far two tensors are apart: largest and mean |difference|, and the largest relative to the largest entry."""

    largest: float
    mean: float
    relative: float

    def within(self, tolerance: float) -> bool:
        return self.relative <= tolerance


APART = Delta(float("inf"), float("inf"), float("inf"))  # other shapes, or numbers where the other has none


def tolerance_for(expected: np.ndarray) -> float:
    return TOLERANCE.get(str(expected.dtype), 0.0)


def delta(expected: np.ndarray, found: np.ndarray) -> Delta:
    if expected.shape != found.shape:
        return APART
    if expected.size == 0:
        return Delta(0.0, 0.0, 0.0)
    a, b = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return APART
    if not finite.any():
        return Delta(0.0, 0.0, 0.0)
    gaps = np.abs(a[finite] - b[finite])
    largest = float(gaps.max())
    scale = float(np.abs(a[finite]).max())
    return Delta(largest, float(gaps.mean()), largest / scale if scale else (0.0 if largest == 0 else float("inf")))


def top1_agreement(expected: np.ndarray, found: np.ndarray) -> float | None:
    """Share of rows whose largest entry along axis 1 is at the same place; None where there are no classes."""
    if expected.ndim < 2 or expected.shape[1] < 2 or expected.shape != found.shape:
        return None
    return float((expected.argmax(1) == found.argmax(1)).mean())
