"""Regions without gradients next to operators whose sizes and numbers only the data tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tgfx


class Constant(nn.Module):
    """Computed from its own buffer and from what goes in, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(16))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.table) * x.mean()


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Model(nn.Module):
    def __init__(self, weigh: Callable[[Tensor], Tensor], by_export: bool, decides: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.region = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3), Constant()
        self.weigh, self.by_export = weigh, by_export
        self.decides = Decides() if decides else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.by_export:  # fx does not follow writing to places that a tensor tells
            x = x.clone()
            x[:, torch.arange(2)] = x[:, 2:4]
        h = self.b(torch.relu(self.a(x)))
        h = self.decides(h + self.region(h))
        return self.c(h) * self.weigh(x)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax().item()


def nonzero(x: Tensor) -> Tensor:
    return (x > 0).nonzero().sum()


def chosen(x: Tensor) -> Tensor:
    return x[x > 0].sum()


def counted(x: Tensor) -> Tensor:
    return torch.bincount((x.flatten() > 0).long(), minlength=2).sum()


def unique(x: Tensor) -> Tensor:
    return torch.unique(x.round()).sum()


def gradients(run: nn.Module, parameters: dict[str, nn.Parameter], x: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(run(x).square().sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def check_gates_and_gradients(model: Model, front_end: str) -> None:
    example = torch.randn(2, 5, 6, dtype=torch.double)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gated = tgfx.transform(model, example).eval()
    assert all(torch.equal(value, state[name]) for name, value in gated.state_dict().items() if name in state)
    assert gated.facts.source.front_end == front_end
    x = torch.randn(2, 5, 6, dtype=torch.double)
    torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=1e-12)
    own = dict(model.named_parameters())
    ours = {name: parameter for name, parameter in gated.named_parameters() if name in own}
    assert set(ours) == set(own)
    torch.testing.assert_close(gradients(gated, ours, x), gradients(model, own, x), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        for gate in gated.gates.values():
            gate.weight[::2] = -1
    torch.testing.assert_close(tgfx.shrink(gated).eval()(x), gated(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_export", [False, True])
@pytest.mark.parametrize("weigh", [largest, nonzero, chosen, counted, unique])
def test_regions_are_followed_beside_what_the_data_decides(weigh: Callable, by_export: bool) -> None:
    model = Model(weigh, by_export).double().eval()
    check_gates_and_gradients(model, "export" if by_export else "fx")
    gated = tgfx.transform(model, torch.randn(2, 5, 6, dtype=torch.double))
    assert set(gated.gates) == {"a", "b"}  # the region did not have to be closed
    assert "region" not in gated.facts.source.opaque


def test_regions_are_followed_beside_a_closed_module() -> None:
    model = Model(largest, by_export=False, decides=True).double().eval()
    check_gates_and_gradients(model, "fx")
    gated = tgfx.transform(model, torch.randn(2, 5, 6, dtype=torch.double))
    assert set(gated.facts.source.opaque) == {"decides"}


def test_no_numbers_are_drawn_and_nothing_moves_where_the_example_is_run() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if x.sum() > 0 else -self.norm(x)

    model = Model(largest, by_export=False).double()
    model.decides = Moves().double()
    model.train()
    example = torch.randn(4, 6, dtype=torch.double)
    statistics, numbers, given = model.decides.norm.running_mean.clone(), torch.get_rng_state(), example.clone()
    gated = tgfx.transform(model, example)
    assert torch.equal(torch.get_rng_state(), numbers) and torch.equal(example, given)
    assert torch.equal(model.decides.norm.running_mean, statistics)
    assert torch.equal(gated.get_buffer("decides.norm.running_mean"), statistics)
