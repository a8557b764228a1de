"""Statistics over living channels where none lives: gates that all close for a while spoil nothing for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import IDENTITY, assert_close
from tgfx.errors import EmptyGroupError
from tgfx.ops.masked import masked_std

READS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y - y.mean(1, keepdim=True),
    "var": lambda y: y / (1 + y.var(1, keepdim=True)),
    "std": lambda y: y / (1 + y.std(1, correction=0, keepdim=True)),
    "layer norm": lambda y: F.layer_norm(y, (8,)),
    "rms norm": lambda y: F.rms_norm(y, (8,), eps=1e-6),
    "group norm": lambda y: F.group_norm(y, 2),
}


class Read(nn.Module):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.beside, self.head, self.read = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.first(x))) + self.head(self.beside(x).tanh())


def test_the_deviation_of_one_channel_has_the_gradient_of_torch() -> None:
    x, gate = torch.randn(3, 4, dtype=torch.float64), torch.tensor([[0, 1, 0, 0]])
    found, expected = x.clone().requires_grad_(), x[:, 1:2].clone().requires_grad_()
    masked_std(found, gate, 1, 0).sum().backward()
    expected.std(1, correction=0).sum().backward()
    assert torch.equal(found.grad, torch.zeros(3, 4)) and torch.equal(expected.grad, torch.zeros(3, 1))


@pytest.mark.parametrize("read", READS)
def test_all_closed_gates_may_open_again(read: str) -> None:
    torch.manual_seed(0)
    model = Read(READS[read]).double()
    gated, x = tgfx.transform(model, torch.randn(4, 4, dtype=torch.float64)), torch.randn(4, 4, dtype=torch.float64)
    for gate in gated.gates.values():
        gate.set_open_(torch.zeros(len(gate.weight), dtype=torch.bool))
    for mode in (False, True):
        y = gated.train(mode)(x)
        assert bool(torch.isfinite(y).all())
    y.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in gated.parameters() if p.grad is not None)
    with pytest.raises(EmptyGroupError):
        tgfx.shrink(gated)
    for gate in gated.gates.values():
        gate.set_open_(torch.ones(len(gate.weight), dtype=torch.bool))
    assert_close(gated.eval()(x), model.eval()(x), IDENTITY, "open again")
