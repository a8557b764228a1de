"""When two results are the same: up to float rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rounding differs between kernels of other sizes; a wrong cut is off by orders of magnitude more.
RELATIVE_TOLERANCE = 5e-4
ROUNDINGS = 8  # so many in a row may go the other way where one alone is more than that (bfloat16, float16)


def close(a: Tensor, b: Tensor, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Equal up to float rounding, relative to the largest entry."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    tolerance = max(tolerance, ROUNDINGS * torch.finfo(a.dtype).eps)
    a, b = a.double(), b.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    if not bool(finite.any()):
        return True
    scale = a[finite].abs().max().clamp_min(1e-30)
    return bool((a[finite] - b[finite]).abs().max() <= tolerance * scale)


def all_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """As many tensors on both sides, of the same shapes, each close to its partner."""
    return len(left) == len(right) and all(map(close, left, right))
