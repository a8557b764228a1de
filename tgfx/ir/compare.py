"""When two results are the same: up to float rounding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Rounding differs between kernels of other sizes; a wrong cut is off by orders of magnitude more. What is still the
# same depends on the precision and on nothing else: in float64 a small mistake shows that rounding hides in float32.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
ROUNDINGS = 8  # so many in a row may go the other way in a type that is coarser (bfloat16, float16)
MOST = 5e-4  # where an output is finer than what was computed on the way


def tolerance_of(dtype: torch.dtype) -> float:
    """Of the largest entry."""
    return TOLERANCES[dtype] if dtype in TOLERANCES else ROUNDINGS * torch.finfo(dtype).eps


class Precision(TorchDispatchMode):
    """Watches a run: `coarsest` is the coarsest type of what it is given and of what it rounds to on the way.

    A float64 model that normalises in float32, as Llama does, is no more exact than float32.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.coarsest: torch.dtype | None = None
        for tensor in given:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            eps = torch.finfo(out.dtype).eps
            if any(isinstance(a, Tensor) and a.is_floating_point() and torch.finfo(a.dtype).eps < eps for a in args):
                self._note(out)
        return out

    def _note(self, tensor: Tensor) -> None:
        known = torch.finfo(self.coarsest).eps if self.coarsest is not None else 0.0
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > known:
            self.coarsest = tensor.dtype


def close(a: Tensor, b: Tensor, coarsest: torch.dtype | None = None) -> bool:
    """Equal up to float rounding, relative to the largest entry; `coarsest`: type that was computed in on the way."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    tolerance = tolerance_of(a.dtype)
    if coarsest is not None:
        tolerance = max(tolerance, min(tolerance_of(coarsest), MOST))
    a, b = a.double(), b.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    if not bool(finite.any()):
        return True
    scale = a[finite].abs().max().clamp_min(1e-30)
    return bool((a[finite] - b[finite]).abs().max() <= tolerance * scale)


def all_close(left: Sequence[Tensor], right: Sequence[Tensor], coarsest: torch.dtype | None = None) -> bool:
    """As many tensors on both sides, of the same shapes, each close to its partner."""
    return len(left) == len(right) and all(close(a, b, coarsest) for a, b in zip(left, right, strict=True))
