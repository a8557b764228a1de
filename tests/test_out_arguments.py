"""Functions that write to `out=`: the graph does what the model does, and can be cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises


class Writes(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.middle(self.second(self.first(x).relu())))


def to_new_memory(x: Tensor) -> Tensor:
    z = torch.empty_like(x)
    torch.add(x, 1, out=z)
    return z


def and_back(x: Tensor) -> Tensor:
    z = torch.empty_like(x)
    return torch.mul(x, 2, out=z) + z


def to_memory_that_grows(x: Tensor) -> Tensor:
    z = x.new_empty(0)
    torch.add(x, 1, out=z)
    return z


def to_a_part(x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    torch.add(x[:, :, :2], 1, out=z[:, :, :2])
    return z


def to_itself(x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return x


def to_what_is_looked_at(x: Tensor) -> Tensor:
    z = torch.empty_like(x)
    view = z[:, :, 1:]
    torch.add(x, 1, out=z)
    return view * 2


def to_another_type(x: Tensor) -> Tensor:
    z = torch.empty_like(x, dtype=torch.float32)
    torch.add(x, 1, out=z)
    return z.double()


def to_two(x: Tensor) -> Tensor:
    largest, place = torch.empty_like(x[:, :, 0]), torch.empty_like(x[:, :, 0], dtype=torch.long)
    torch.max(x, 2, out=(largest, place))
    return largest[..., None]


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(x.ndim - 2):
        z = torch.empty_like(x)
        torch.mul(x, 2, out=z)
        x = z
    return x


WRITERS = [
    to_new_memory, and_back, to_memory_that_grows, to_a_part, to_itself, to_what_is_looked_at, to_another_type, to_two,
    in_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("middle", WRITERS)
def test_same_outputs_and_exact_cut(middle: Callable) -> None:
    model = Writes(middle).double().eval()
    gated = tgfx.transform(model, torch.randn(2, 3, 8, 8, dtype=torch.double)).eval()
    x = torch.randn(3, 3, 8, 8, dtype=torch.double)
    with torch.no_grad():  # torch knows no derivative of out=
        promises.assert_close(gated(x), model(x), promises.IDENTITY, "gated output")
        promises.gate_at_random(gated, 0.5, 0)
        promises.assert_close(tgfx.shrink(gated).eval()(x), gated(x), promises.EXACT, "compact output")
    assert len(gated.gates) == (1 if middle is to_two else 2)
