"""What closing a gate really costs, learned from the gradients that training makes anyway.

In a trained model the derivative of the loss by an open gate is near zero, so it says little about the gate's closing,
which is a whole step from 1 to 0. The second-order term does:

    loss(closed) − loss(open) ≈ ½·h − g      seen from the open gate
                              ≈ −½·h − g     seen from the closed one

g is the mean gradient. h, the curvature, is estimated by the Fisher information, the mean square of the gradient over
single samples: with batches of n, n times the variance over batches, plus g². Near a minimum g is mostly noise, and
noise must not open and close gates, so g counts only as far as it is beyond its own standard error (twice that).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgfx.training.saved_state import check_fits

SURE = 2.0  # standard errors


class Evidence:
    """Running means over batches, per gate, and from them the rise of the loss when the gate is closed."""

    def __init__(self, size: int, *, memory: float, device: torch.device | str = "cpu") -> None:
        """`memory`: about how many batches the means remember."""
        self.memory = memory
        self.seen = 0
        self.samples = 1
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.square = torch.zeros(size, dtype=torch.float64, device=device)

    def update(self, gradient: Tensor, samples: int, probe: Tensor | None = None) -> bool:
        """Take in the gradient of a batch of `samples`; False if it is not finite, and then nothing changes.

        `probe`: not used here, where weights move and make up for much of what the curvature foretells.
        """
        gradient = gradient.to(self.mean)
        if not bool(gradient.isfinite().all()):
            return False
        self.seen += 1
        self.samples = samples
        rate = max(1 / self.memory, 1 / self.seen)
        self.mean.lerp_(gradient, rate)
        self.square.lerp_(gradient.square(), rate)
        return True

    def rise(self, opened: Tensor) -> Tensor:
        """Loss with the gate closed minus loss with it open, by the state the gate is in."""
        variance = (self.square - self.mean.square()).clamp(min=0)
        curvature = self.samples * variance + self.mean.square()
        error = (variance / max(1.0, min(self.seen, 2 * self.memory - 1))).sqrt()
        slope = self.mean.sign() * (self.mean.abs() - SURE * error).clamp(min=0)
        return torch.where(opened, curvature, -curvature) / 2 - slope

    def state_dict(self) -> dict[str, object]:
        own = {"seen": self.seen, "samples": self.samples}
        return {**own, "mean": self.mean.clone(), "square": self.square.clone()}

    def load_state_dict(self, state: dict) -> None:
        check_fits(state, {"mean": self.mean, "square": self.square}, "evidence of the gates")
        self.seen, self.samples = state["seen"], state["samples"]
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
