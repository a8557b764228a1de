"""Gates of what is summed up: on the very axis, also where a tensor has the same channels on several axes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, assert_close, gate_at_random

Mix = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Fully-connected, (a product of parameters and channels), fully-connected."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix, self.first, self.last = mix, nn.Linear(6, 12), nn.Linear(12, 3)
        self.w, self.tall = nn.Parameter(torch.randn(12, 12)), nn.Parameter(torch.randn(12, 5))
        self.wide, self.beside = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mix(self, torch.relu(self.first(x)))))


MIXES: dict[str, Mix] = {
    "w w^T": lambda m, x: F.linear(x, m.w @ m.w.t()),
    "w^T w": lambda m, x: F.linear(x, m.w.t() @ m.w),
    "w w^T from the left": lambda m, x: ((m.w @ m.w.t()) @ x.t()).t(),
    "w w": lambda m, x: F.linear(x, m.w @ m.w),
    "w f(w)": lambda m, x: F.linear(x, m.w @ torch.exp(m.w)),
    "f(w) w": lambda m, x: F.linear(x, torch.exp(m.w) @ m.w),
    "w f(w)^T": lambda m, x: F.linear(x, m.w @ torch.exp(m.w).t()),
    "f(w) f(w)^T": lambda m, x: F.linear(x, torch.cos(m.w) @ torch.exp(m.w).t()),
    "low rank": lambda m, x: F.linear(x, m.tall @ m.tall.t()),
    "twice": lambda m, x: F.linear(F.linear(x, m.w @ m.w.t()), m.w),
    "gram matrix of channels": lambda m, x: F.linear(x, torch.exp(0.1 * x.t() @ x)),
    "gram matrix, squared": lambda m, x: F.linear(x, torch.mm(torch.cos(m.w @ m.w.t()), torch.cos(m.w @ m.w.t()))),
    "sum over both axes": lambda m, x: x * torch.cos(m.w @ m.w.t()).sum(),
    "sum over two groups": lambda m, x: x * torch.cos(m.tall @ m.wide).sum(),
    "sum over two groups, one after another": lambda m, x: x * torch.cos(m.tall @ m.wide).sum(0).sum(),
    "mean over two groups": lambda m, x: x * torch.cos(m.tall @ m.wide).mean(),
    "mean over both axes": lambda m, x: x * torch.cos(m.w @ m.w.t()).mean(),
    "variance over two groups": lambda m, x: x * torch.cos(m.tall @ m.wide).var((0, 1)),
    "norm over two groups": lambda m, x: x + torch.cos(m.tall @ m.wide).norm(),
    "layer norm over two groups": lambda m, x: x * F.layer_norm(torch.cos(m.tall @ m.wide), (12, 8))[:, :1].sum(),
    "both axes of a product": lambda m, x: x * torch.einsum("ab,ab->", torch.cos(m.tall @ m.wide), m.beside),
    "layer norm over one of two": lambda m, x: F.linear(x, F.layer_norm(torch.cos(m.w @ m.w.t()), (12,))),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("seed", range(2))
def test_each_axis_is_gated(mix: Mix, seed: int) -> None:
    torch.manual_seed(seed)
    net, x = Net(mix).double().eval(), torch.randn(4, 6, dtype=torch.float64)
    gated = tgfx.transform(net, x)
    for density in (0.7, 0.3):
        gate_at_random(gated, density, seed)
        gated.eval()
        with torch.no_grad():
            assert_close(tgfx.shrink(gated, verify=False).eval()(x), gated(x), EXACT, "the cut model")
    for gate in gated.gates.values():
        gate.set_open_(torch.ones_like(gate.weight, dtype=torch.bool))
    with torch.no_grad():
        assert_close(gated(x), net(x), EXACT, "all open")
