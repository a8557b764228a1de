"""One node that reads two gated axes at once: a gate along each of them, also where both have the same channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, IDENTITY, assert_close, gate_at_random


class OverTheWeight(nn.Module):
    """What is computed from a whole weight, as in BitNet and XNOR-Net."""

    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        w = self.second.weight
        return self.head(F.linear(self.first(x).relu(), w.sign() * self.scale(w), self.second.bias).relu())


class Convolved(nn.Module):
    def __init__(self, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        w = self.second.weight
        return self.head(F.conv2d(self.first(x).relu(), w / self.scale(w), self.second.bias).relu().mean((2, 3)))


class Outer(nn.Module):
    """Of two vectors of channels; `tied`: of one with itself."""

    def __init__(self, reduction: Callable[[Tensor], Tensor], *, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reduction, self.tied = reduction, tied

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        z = y if self.tied else self.second(y).sigmoid()
        r = self.reduction(y[:, :, None] * z[:, None, :] + 1)
        return self.head(r.reshape(x.shape[0], -1).sum(1, keepdim=True) * y)


class OverTokens(nn.Module):
    """Token mixing gives tokens channels of their own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.mix, self.back = nn.Linear(3, 8), nn.Linear(5, 6), nn.Linear(6, 5)
        self.norm, self.head = norm, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(self.embed(x).transpose(1, 2)).transpose(1, 2))
        return self.head(self.back(y.transpose(1, 2)).transpose(1, 2))


def holds(model: nn.Module, shape: tuple[int, ...]) -> tgfx.GatedModule:
    torch.manual_seed(1)
    model = model.double().eval()
    gated = tgfx.transform(model, torch.randn(shape, dtype=torch.float64)).eval()
    with torch.no_grad():
        for seed, batch in enumerate((shape[0], 1, 5)):
            x = torch.randn(batch, *shape[1:], dtype=torch.float64)
            for gate in gated.gates.values():
                gate.set_open_(torch.ones(len(gate.weight), dtype=torch.bool))
            assert_close(gated(x), model(x), IDENTITY, f"all gates open, batch {batch}")
            gate_at_random(gated, 0.5, seed)
            assert_close(tgfx.shrink(gated, verify=False)(x), gated(x), EXACT, f"the cut model, batch {batch}")
    return gated


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda w: w.abs().mean(),
    "std": lambda w: w.std(),
    "var of itself": lambda w: torch.var(w, False),
    "norm": lambda w: w.norm(),
    "sum": lambda w: w.abs().sum(),
    "its own mean": lambda w: w.mean() + 2,
}


@pytest.mark.parametrize("scale", SCALES)
def test_a_weight_as_a_whole(scale: str) -> None:
    torch.manual_seed(0)
    assert set(holds(OverTheWeight(SCALES[scale]), (4, 6)).gates) == {"first", "second"}
    assert set(holds(Convolved(SCALES[scale]), (2, 3, 7, 7)).gates) == {"first", "second"}


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda p: p.mean((1, 2)),
    "var": lambda p: p.var((1, 2)),
    "sum": lambda p: p.sum((1, 2)),
    "norm": lambda p: p.norm(dim=(1, 2)),
    "mean of rows": lambda p: p.mean(2, keepdim=True).tanh(),
    "sum of columns": lambda p: p.sum(1).tanh(),
    "product": lambda p: torch.bmm(p, p),
    "einsum over the last": lambda p: torch.einsum("bij,bkj->bik", p, p).tanh(),
    "einsum over the first": lambda p: torch.einsum("bij,bik->bjk", p, p).tanh(),
    "layer norm": lambda p: F.layer_norm(p, (8, 8)).exp(),
    "layer norm of rows": lambda p: F.layer_norm(p, (8,)).exp(),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_outer_product(reduction: str, tied: bool) -> None:
    torch.manual_seed(0)
    assert "first" in holds(Outer(REDUCTIONS[reduction], tied=tied), (4, 6)).gates


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_tokens_and_channels(kind: type[nn.Module], affine: bool) -> None:
    torch.manual_seed(0)
    norm = kind([6, 8], elementwise_affine=affine)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    assert set(holds(OverTokens(norm), (2, 5, 3)).gates) == {"embed", "mix"}
