"""What becomes of gradients between backward and the step, seen on a tiny one that is left behind.

Gradients of gates over single weights are looked at in backward and freed. What comes after that they would miss: a
GradScaler divides all gradients by its scale, and where one is not finite it leaves the step out, and all are thrown
away. So one gate keeps a gradient, of the same tiny number everywhere, which shares the fate of the others. (Also where
the user clips them: evidence is of gradients as they are at the step, whether or not they could be freed.)
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 2.0**-60  # counts for nothing in a norm over all gradients, and any scale may still divide it


class GradientMark:
    """A mark on one gate, to be put there after its own gradient has been freed."""

    def __init__(self, latent: Tensor) -> None:
        self._latent = latent
        self._size = max(TINY, torch.finfo(latent.dtype).smallest_normal)
        self._there = False

    def put(self) -> None:
        if not self._there:
            self._latent.grad = torch.full_like(self._latent, self._size)
            self._there = True

    @property
    def lost(self) -> bool:
        """Whether the gradients that it was left for have been thrown away: by zero_grad, to None or to zeros."""
        return self._there and (self._latent.grad is None or not bool(self._latent.grad.any()))

    def lift(self) -> float:
        """Take it away; what gradients were multiplied by since it was put there, 1 if it was not."""
        if not self._there:
            return 1.0
        factor = 0.0 if self._latent.grad is None else float(self._latent.grad.max()) / self._size
        self.clear()
        return factor

    def clear(self) -> None:
        if self._there:
            self._latent.grad, self._there = None, False
