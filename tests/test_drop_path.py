"""Drop path of any library is recognised by what it does, and its torch twin draws the same numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises, stepwise
from tgfx.capture.drop_path import drop_probability
from tgfx.rounded_drop_path import rounded_drop_probability


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


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
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


class Deep(nn.Module):
    """Inputs of five axes, channels first or last."""

    def __init__(self, drop: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.last = nn.Conv3d(3, 8, 1), nn.Conv3d(8, 8, 1), drop, last
        self.out = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        y = self.drop(y.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3) if self.last else self.drop(y)
        return self.out(x + y)


@pytest.mark.parametrize("last", [False, True])
def test_five_axes(last: bool) -> None:
    torch.manual_seed(0)
    model = Deep(DropPath(0.5), last=last)
    inputs = [torch.randn(6, 3, 2, 3, 4) for _ in stepwise.MODES]
    gated = tgfx.transform(model, inputs[0])
    assert {gate.weight.numel() for gate in gated.gates.values()} == {8}, "all channels stay gated"
    compact = stepwise.exact_cut(copy.deepcopy(gated), inputs[0])
    assert compact.get_submodule("b").out_channels < 8
    stepwise.same_step_for_step(model, gated, inputs)


class RoundedDropPath(nn.Module):
    """As in DeiT, and in one way or another in transformers."""

    def __init__(self, p: float, *, like: str = "deit") -> None:
        super().__init__()
        self.p, self.like = p, like

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        keep, shape = 1 - self.p, (x.shape[0],) + (1,) * (x.ndim - 1)
        noise = torch.rand(shape, dtype=x.dtype, device=x.device)
        if self.like == "deit":
            noise = keep + noise
            noise.floor_()
            return x.div(keep) * noise
        if self.like == "transformers":
            return x.div(keep) * torch.floor(noise + keep)
        if self.like == "in place":
            return x.div_(keep) * torch.floor(noise + keep)
        if self.like == "noise divided":
            return x * torch.floor(noise.div(keep) + keep)
        return x.div(keep) * torch.floor(torch.rand_like(x) + keep)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("like", ["deit", "transformers"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rounded_probability_is_read_off(p: float, like: str, rank: int) -> None:
    layer = RoundedDropPath(p, like=like).eval()
    state = torch.get_rng_state()
    assert rounded_drop_probability(layer, rank) == pytest.approx(p, abs=1e-12)
    assert not layer.training and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("like", ["in place", "noise divided", "each entry"])
def test_other_rounding_layers_are_not_mistaken_for_it(like: str) -> None:
    assert rounded_drop_probability(RoundedDropPath(0.3, like=like), 4) is None
    assert drop_probability(RoundedDropPath(0.3), 4) is None


def rounded(rank: int) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    drop = RoundedDropPath(0.5)
    model = Net(drop) if rank == 4 else Deep(drop, last=True)
    return model, [torch.randn(16, 3, 2, 2, *[3] * (rank - 4)) for _ in stepwise.MODES]


@pytest.mark.parametrize("rank", [4, 5])
def test_rounded_ones_draw_the_same_where_gated(rank: int) -> None:
    model, inputs = rounded(rank)
    gated = tgfx.transform(model, inputs[0])
    assert gated.facts.source.training is None, "one graph for both modes"
    stepwise.same_step_for_step(model, gated, inputs)


@pytest.mark.parametrize("rank", [4, 5])
def test_cut_models_have_torchs_own_layer_for_rounded_ones(rank: int) -> None:
    model, (x, *_) = rounded(rank)
    gated = tgfx.transform(model, x)
    promises.gate_at_random(gated, 0.5, 0)
    compact = tgfx.shrink(gated.eval())
    promises.only_torch_modules(compact)
    loaded = pickle.loads(pickle.dumps(compact))
    promises.only_torch_modules(loaded)
    with torch.no_grad():
        expected = gated(x)
        for one in (compact, loaded, pickle.loads(pickle.dumps(compact.train())).eval()):
            promises.assert_close(one.eval()(x), expected, promises.EXACT, "eval mode")


def test_cut_models_drop_as_often() -> None:
    model, _ = rounded(4)
    model.drop.p = 0.2
    x = torch.randn(1, 3, 2, 2).repeat(20_000, 1, 1, 1)
    gated = tgfx.transform(model, x[:2])
    compact = tgfx.shrink(gated).train()
    with torch.no_grad():
        kept = [one(x).flatten(1) for one in (gated.train(), compact)]
    values = [torch.unique(y.round(decimals=4), dim=0, return_counts=True) for y in kept]
    torch.testing.assert_close(values[0][0], values[1][0], rtol=0, atol=2e-4)
    for _, counts in values:
        assert sorted((counts / len(x)).tolist()) == pytest.approx([0.2, 0.8], abs=0.015)  # 5 standard errors


def test_a_shared_rounded_layer_goes_under_all_names() -> None:
    model, (x, *_) = rounded(4)
    twice = nn.Sequential(model, nn.Conv2d(2, 3, 1), Net(model.drop))
    compact = tgfx.shrink(tgfx.transform(twice, x))
    promises.only_torch_modules(compact)
