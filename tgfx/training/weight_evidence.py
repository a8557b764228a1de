"""What closing a single weight really costs, learned from the gradients that training makes anyway.

As with channels (tgfx.training.evidence) the derivative of the loss by an open gate is near zero in a trained model and
says little about the gate's closing; the second-order term does:

    loss(closed) − loss(open) ≈ ½·h,    h = w²·F

F is the Fisher information of the weight w, the mean square of the derivative by it. Other than the size of a weight it
tells what a weight is read with, and is the same however a layer is scaled (batch norm undoes that, and so does the
next layer). There are as many gates as weights, so F is not kept for each, but for rows and columns of a weight, as
Adafactor does:

    F[i, j] ≈ row[i] · column[j] / mean

That is next to no memory, and a mean over many weights is sure after a few batches, when each single one is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgfx.gates import GateSettings
from tgfx.ops.weight_gate import row_blocks
from tgfx.training.saved_state import check_fits, misfit

LEAST = 1e-6  # of a layer's mean F: for rows and columns without any gradient, where the sizes of weights then decide
NOTHING = 1e-24  # F where a whole layer has none


class WeightEvidence:
    """Running means over batches for the rows and columns of one weight, in blocks: see tgfx.ops.weight_gate."""

    def __init__(self, shape: torch.Size, *, memory: float, device: torch.device | str = "cpu") -> None:
        """`memory`: about how many batches the means remember."""
        self.memory = memory
        self.seen = 0
        self.row = torch.zeros(shape[0], dtype=torch.float64, device=device)
        self.column = torch.zeros(shape[1], dtype=torch.float64, device=device)
        self.mean = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: list[Tensor] | None = None  # of the gradients since the last step

    def update(self, weight: Tensor, latent: Tensor, settings: GateSettings) -> bool:
        """Take in the gradient of a step in one go; what `learn` says."""
        self.take(weight, latent, settings)
        return self.learn()

    @torch.no_grad()
    def take(self, weight: Tensor, latent: Tensor, settings: GateSettings) -> None:
        """Add up what the gradient of the gates, which is w · dloss/dw, tells; it is not needed after that.

        A mean of (dloss/dw)² with weights w²: the small weights, which would have to be divided by, do not matter.
        """
        gradient = latent.grad
        if gradient is None:
            return
        if self._sums is None:
            self._sums = [torch.zeros_like(like) for like in (self.row, self.row, self.column, self.column)]
        squares, shares, below, wide = self._sums
        for rows in row_blocks(weight.shape):
            share, slope = weight[rows].detach().to(latent.dtype), settings.slope(latent[rows])
            share = share.square() if slope is None else share.mul(slope).square_()
            square = gradient[rows].square()
            squares[rows] += _rows(square)
            shares[rows] += _rows(share)
            below += _columns(square)
            wide += _columns(share)

    def forget(self) -> None:
        """What was taken since the last step is of gradients that were thrown away."""
        self._sums = None

    def learn(self, factor: float = 1.0) -> bool:
        """Turn what was taken since the last step into means; False if it is nothing, or not finite.

        `factor`: what the gradients have been multiplied by since.
        """
        taken, self._sums = self._sums, None
        if taken is None:
            return False
        squares, shares, below, wide = taken
        squares, below = squares * factor**2, below * factor**2
        total = squares.sum()
        if not bool(total.isfinite()):
            return False
        self.seen += 1
        rate = max(1 / self.memory, 1 / self.seen)
        for known, square, share in ((self.row, squares, shares), (self.column, below, wide)):
            known.lerp_(square / share.clamp(min=1e-300), rate)
        self.mean.lerp_(total / shares.sum().clamp(min=1e-300), rate)
        return bool(total > 0)

    def write_(self, latent: Tensor, weight: Tensor, scale: Tensor) -> None:
        """latent ← √(worth · scale), with the sign of the worth."""
        for rows in row_blocks(weight.shape):
            score = self.worth(weight, rows) * (scale[rows] if scale.shape[0] > 1 else scale)
            latent[rows] = score.abs().sqrt_().copysign_(score)

    def worth(self, weight: Tensor, rows: slice) -> Tensor:
        """w²·F for these rows: what closing them costs, but for a factor."""
        square = torch.outer(self.row[rows], self.column / self.mean.clamp(min=1e-300)).clamp_(min=self._least)
        return square.reshape(*square.shape, *(1 for _ in range(weight.ndim - 2))) * weight[rows].double().square()

    def curvature_at(self, weight: Tensor, places: tuple[Tensor, ...]) -> Tensor:
        """w²·F of single weights, by their indices along each axis."""
        square = self.row[places[0]] * self.column[places[1]] / self.mean.clamp(min=1e-300)
        return square.clamp_(min=self._least) * weight[places].double().square()

    @property
    def _least(self) -> float:
        return max(LEAST * float(self.mean), NOTHING)

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, **{name: tensor.clone() for name, tensor in self.tensors().items()}}

    def tensors(self) -> dict[str, Tensor]:
        return {"row": self.row, "column": self.column, "mean": self.mean}

    def check(self, state: dict, name: str) -> None:
        """Raise TrainingError unless this is a state for a weight of the same shape."""
        check_fits(state, self.tensors(), f"evidence of {name}")
        other = set(state) - set(self.tensors()) - {"seen"}
        if other:
            raise misfit(f"no {', '.join(sorted(other))}", "saved ones", f"evidence of {name}")

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]
        for name, own in self.tensors().items():
            own.copy_(state[name])


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1, dtype=torch.float64)


def _columns(values: Tensor) -> Tensor:
    return values.flatten(2).sum((0, 2), dtype=torch.float64) if values.ndim > 2 else values.sum(0, dtype=torch.float64)
