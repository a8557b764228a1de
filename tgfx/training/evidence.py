"""What closing a gate really costs, learned from the gradients that training makes anyway.

In a trained model the derivative of the loss by an open gate is near zero, so it says nothing about the gate's closing,
which is a whole step from 1 to 0. The second-order term does:

    loss(closed) − loss(open) ≈ −g + ½·h      seen from the open gate
                              ≈ −g − ½·h      seen from the closed one

g is the gradient of the batch; h, the curvature, is estimated by the Fisher information: E[g²] over single samples,
which is n·E[g²] over batches of n when g has mean zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Evidence:
    """A running mean, per gate, of how much the loss rises when the gate is closed."""

    def __init__(self, size: int, *, memory: float, device: torch.device | str = "cpu") -> None:
        """`memory`: about how many batches the mean remembers."""
        self.memory = memory
        self.seen = 0
        self.first = torch.zeros(size, dtype=torch.float64, device=device)
        self.second = torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, gradient: Tensor, samples: int) -> bool:
        """Take in the gradient of a batch of `samples`; False if it is not finite, and then nothing changes."""
        gradient = gradient.double()
        if not bool(gradient.isfinite().all()):
            return False
        self.seen += 1
        rate = max(1 / self.memory, 1 / self.seen)
        self.first.lerp_(gradient, rate)
        self.second.lerp_(samples * gradient.square(), rate)
        return True

    def rise(self, opened: Tensor) -> Tensor:
        """Loss with the gate closed minus loss with it open, by the state the gate is in."""
        curvature = self.second / 2
        return torch.where(opened, curvature, -curvature) - self.first

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "first": self.first.clone(), "second": self.second.clone()}

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]
        self.first.copy_(state["first"])
        self.second.copy_(state["second"])
