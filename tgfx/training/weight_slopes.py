"""What a single weight is worth where only gates are trained: its curvature, and the slopes met on the way down.

With frozen weights nothing makes up for a weight that is gone but the choice of those that stay, and which of them do
that together no curvature tells. The slope g of the loss by each gate does, open or closed, at the gates of the moment:

    score = h − 2·η·Σg        h = w²·F, as in tgfx.training.weight_evidence;  Σg: over the steps so far

This is descent, in which a gate may only be 0 or 1. Let a be the share of its weight that a gate would like to have, 1
at first, and a ← a − η·g/h a step of it. Nearer to 1 than to 0, as h measures distance, are the gates of largest
h·(2a − 1), which is the score. What all gates together do wrong has a slope for each of them long before one alone is
worth anything, so η is small. Single slopes are mostly noise, of variance h over a batch (h is counted per batch here),
and by the end of a run noise may have moved a gate at the threshold by no more than a share of its worth (`rate_of`).
It takes one number per gate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tgfx.gates import GateSettings
from tgfx.ops.weight_gate import row_blocks
from tgfx.training.vectors import FLAT
from tgfx.training.weight_evidence import WeightEvidence

STEP = 0.1  # how far noise may have moved a gate at the threshold when the run ends, as a share of its worth
REMEMBERED, SHORTEST, LONGEST = 0.2, 10.0, 200.0  # F: share of the steps, and limits in steps; weights stand still


def memory_of(steps: int) -> float:
    """About how many batches the means remember."""
    return min(max(SHORTEST, REMEMBERED * steps), LONGEST)


def rate_of(worth: float, steps: int) -> float:
    """2·η, from the h of a gate at the threshold (per batch, so that it is the variance of g)."""
    return STEP * math.sqrt(worth / steps)


class SlopeEvidence(WeightEvidence):
    """The evidence for the entries of one frozen weight. `rate`, 2·η, is set before scores are asked for."""

    def __init__(self, shape: torch.Size, *, memory: float, device: torch.device | str = "cpu") -> None:
        super().__init__(shape, memory=memory, device=device)
        self.rate = 0.0
        self.slopes = torch.zeros(shape, dtype=torch.float32, device=device)
        self._found: Tensor | None = None  # gradient of the latent weights since the last step

    @torch.no_grad()
    def take(self, weight: Tensor, latent: Tensor, settings: GateSettings) -> None:
        super().take(weight, latent, settings)
        if latent.grad is not None:
            # detached: of a backward with create_graph the sum would keep every step's graph
            slopes = _by_value(latent.grad.detach(), latent, settings)
            self._found = slopes if self._found is None else self._found + slopes

    def forget(self) -> None:
        super().forget()
        self._found = None

    def learn(self, factor: float = 1.0) -> bool:
        found, self._found = self._found, None
        if not super().learn(factor):
            return False
        if found is not None:
            self.slopes.add_(found, alpha=factor)
        return True

    def worth(self, weight: Tensor, rows: slice) -> Tensor:
        return super().worth(weight, rows) - self.rate * self.slopes[rows]

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "slopes": self.slopes}


def _by_value(gradient: Tensor, latent: Tensor, settings: GateSettings) -> Tensor:
    """Derivatives by what the gates give, from those by their latent weights."""
    if settings.slope(latent[:1]) is None:
        return gradient
    found = torch.empty_like(gradient)
    for rows in row_blocks(latent.shape):
        slope = settings.slope(latent[rows])
        assert slope is not None
        found[rows] = torch.where(slope.abs() > FLAT, gradient[rows] / slope, torch.zeros_like(slope))
    return found
