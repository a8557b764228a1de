"""Drop path of any library is recognised by what it does, and its torch twin draws the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tgfx.capture.drop_path import drop_probability


class DropPath(nn.Module):
    def __init__(self, p: float, *, scale: bool = True, per_batch: bool = False) -> None:
        super().__init__()
        self.p, self.scale, self.per_batch = p, scale, per_batch

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        rows = 1 if self.per_batch else x.shape[0]
        noise = x.new_empty((rows,) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if self.scale:
            noise.div_(keep)
        return x * noise


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_probability_is_read_off(p: float, rank: int) -> None:
    assert drop_probability(DropPath(p), rank) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize("layer", [DropPath(0.3, scale=False), DropPath(0.3, per_batch=True), nn.Identity()])
def test_other_layers_are_not_mistaken_for_it(layer: nn.Module) -> None:
    assert not drop_probability(layer, 4)


class Net(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), drop
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.out(x + self.drop(self.b(x)))


def test_the_twin_draws_the_same_numbers() -> None:
    torch.manual_seed(0)
    model, x = Net(DropPath(0.5)), torch.randn(16, 3, 2, 2)
    gated = tgfx.transform(model, x).train()
    compact = tgfx.shrink(gated).train()
    results = []
    for one in (model.train(), gated, compact):
        torch.manual_seed(1)
        results.append(one(x))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=1e-6)
    assert all(type(m).__module__.startswith("torch") for m in compact.modules())
