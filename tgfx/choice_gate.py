"""The n-ary trainable gate: a choice of one among n with a derivative (paper, section 3.1, "n-simplex").

    TG(w) = b(w) + P·(s(w)·g(w)),    P = I − 11ᵀ/n

b(w) is the vertex of the simplex at the largest weight: one 1, the rest 0. s and g are the binary gate's, weight by
weight. P projects onto the simplex's own directions, so that TG keeps the sum 1 and its derivative, P·diag(g), says how
the loss changes when one alternative gains what the others lose. For n = 2 these are two binary gates of opposite sign.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgfx.errors import InputError
from tgfx.gates import GateSpec
from tgfx.sharding import like, whole

__all__ = ["ChoiceGate"]


class ChoiceGate(nn.Module):
    """n weights, of which the largest is chosen: TG(w) in training mode, exactly one-hot in eval.

    The weights start as `spec` says; where several are largest, the first is chosen.
    """

    def __init__(self, size: int, spec: GateSpec) -> None:
        super().__init__()
        if spec.binary != "step":
            raise InputError(
                "a choice has no binary gate of its own: the largest weight is chosen",
                expected='binary="step"',
                found=f"binary={spec.binary!r}",
            )
        self.settings = spec.settings
        self.init_value = spec.init_value
        self.weight = nn.Parameter(spec.build(size).weight.detach())

    def forward(self) -> Tensor:
        """One value for each alternative."""
        chosen = self.is_open()
        if not self.training:
            return chosen.to(self.weight.dtype)
        # the elementwise gate with b taken off is s·g
        shaped = self.settings.trained(self.weight) - self.settings.binary_value(self.weight)
        return chosen.to(self.weight.dtype) + shaped - shaped.mean()

    def chosen(self) -> int:
        """Index of the largest weight, the first of several."""
        return int(self.weight.detach().argmax())

    def is_open(self) -> Tensor:
        """Which alternative is chosen, as a bool vector."""
        weight = self.weight.detach()
        return torch.arange(len(weight), device=weight.device) == weight.argmax()

    def open_count(self) -> int:
        return 1

    @torch.no_grad()
    def set_open_(self, mask: Tensor) -> ChoiceGate:
        """Choose the alternative where `mask` is true; it trades weights with the one chosen so far."""
        fits = isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.shape == self.weight.shape
        if not fits or int(mask.sum()) != 1:
            raise InputError(
                "the mask does not fit",
                expected=f"bool tensor ({len(self.weight)},) with exactly one true entry",
                found=repr(mask),
            )
        weight = whole(self.weight).clone()
        before, wanted = int(weight.argmax()), int(mask.nonzero())
        if before != wanted:
            largest = weight[before].clone()
            lead = largest - weight[wanted]
            weight[before] = weight[wanted]
            weight[wanted] = largest + (abs(self.init_value) or 1.0 if lead == 0 else 0.0)
            self.weight.copy_(like(weight, self.weight))
        return self

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, M={self.settings.M:g}"
