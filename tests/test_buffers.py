"""Buffers that the forward reads are asked for in every call: what is loaded into them later counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx


class Normalised(nn.Module):
    """Reads buffers through views and arithmetic, as image models do with mean and deviation."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("scale", torch.linspace(value, 2 * value, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x - self.mean[None, :, None, None]) * (self.scale[:, None, None] + 1)
        return self.two(torch.relu(y))


@pytest.mark.parametrize("closed", [(), (1, 6)])
def test_a_loaded_state_counts(closed: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, other, x = Normalised(1.0).eval(), Normalised(3.0).eval(), torch.randn(2, 3, 10, 10)
    gated = tgfx.transform(model, x).eval()
    names = {name for name in gated.state_dict() if "gate_" not in name}
    assert names == set(model.state_dict())
    with torch.no_grad():
        next(iter(gated.gates.values())).weight[list(closed)] = -0.5
    missing = gated.load_state_dict(other.state_dict(), strict=False)
    assert not missing.unexpected_keys
    compact = tgfx.shrink(gated)
    assert set(compact.state_dict()) == set(model.state_dict())
    assert torch.allclose(compact(x), gated(x), atol=1e-5)
    if not closed:
        assert torch.allclose(gated(x), other(x), atol=1e-5)
        compact.load_state_dict(model.state_dict())
        assert torch.allclose(compact(x), model(x), atol=1e-5)


class Moving(nn.Module):
    """Keeps a mean of its own in train mode, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)), alpha=0.1)
        return self.two(y - self.mean[:, None, None])


def test_a_buffer_that_moves_is_used_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Moving().train(), torch.randn(2, 3, 10, 10)
    gated = tgfx.transform(model, x)
    assert torch.equal(gated.mean, torch.zeros(8))
    for _ in range(3):
        assert torch.allclose(gated(x), model(x), atol=1e-6)
        assert torch.allclose(gated.mean, model.mean, atol=1e-6)
    assert torch.allclose(gated.eval()(x), model.eval()(x), atol=1e-6)
