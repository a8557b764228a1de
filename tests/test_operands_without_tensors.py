"""Operators of torch that are called on plain numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.half_cut import channels_gated, half_cut


class Halved(nn.Module):
    """Longformer divides sizes so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.div(x.shape[1], 2, rounding_mode="trunc")
        return self.last(torch.relu(self.first(x))) * half + torch.mul(x.shape[1], 2)


def test_a_division_of_two_numbers_has_no_channels() -> None:
    gated = half_cut(Halved(), torch.randn(2, 4, dtype=torch.float64))
    assert channels_gated(gated) == 8


def test_a_number_that_becomes_a_tensor_scales_as_any_other() -> None:
    class Scaled(Halved):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            return self.last(y * torch.div(y.shape[1], 3) + torch.div(torch.ones(()).to(y), y.shape[0]))

    gated = half_cut(Scaled(), torch.randn(2, 4, dtype=torch.float64))
    assert channels_gated(gated) == 8
