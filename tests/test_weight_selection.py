"""Which gates of single weights stay open: the largest, ties by size and place, and the budget is used up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tgfx.errors import BudgetError
from tgfx.ops import weight_gate
from tgfx.training import weight_threshold
from tgfx.training.weight_candidates import Candidates
from tgfx.training.weight_landing import shift_to_
from tgfx.training.weight_selection import counts_of, largest, shift_


def candidates(latents: list[Tensor], weights: list[Tensor], prices: list[float]) -> list[Candidates]:
    return [
        Candidates(latent, weight, {"price": torch.full((1, 1), price, dtype=torch.float64)})
        for latent, weight, price in zip(latents, weights, prices, strict=True)
    ]


def drawn(seed: int, values: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Two weights; latent weights and sizes of few different values, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, 4), (3, 7)]
    latents = [torch.randint(-values, values + 1, shape, generator=generator).to(dtype) / 8 for shape in shapes]
    weights = [torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in shapes]
    return latents, weights


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    values=st.sampled_from([0, 1, 3, 100]),
    room=st.integers(0, 45),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_the_order_is_latent_weight_then_size_then_place(seed: int, values: int, room: int, dtype: torch.dtype) -> None:
    latents, weights = drawn(seed, values, dtype)
    flat = torch.cat([one.flatten() for one in latents]).double().numpy()
    sizes = torch.cat([one.abs().flatten() for one in weights]).double().numpy()
    wanted = np.zeros(len(flat), dtype=bool)
    wanted[np.lexsort((np.arange(len(flat)), -sizes, -flat))[:room]] = True
    before = (torch.cat([one.flatten() for one in latents]) > 0).numpy()
    gates = candidates(latents, weights, [1.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gate, "BLOCK", 4)  # a row at a time
        cutoff = largest(gates, {"price": room})
        assert counts_of(gates, cutoff) == [int(wanted[:20].sum()), int(wanted[20:].sum())]
        kept = [one.clone() for one in latents]
        moved = shift_(gates, cutoff)
    after = (torch.cat([one.flatten() for one in latents]) > 0).numpy()
    assert (after == wanted).all()
    assert moved == bool((before != wanted).any())
    assert moved or all(torch.equal(one, other) for one, other in zip(kept, latents, strict=True))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    values=st.sampled_from([0, 1, 3, 20, 1000]),
    share=st.floats(0, 1),
    by_row=st.booleans(),
    sample=st.sampled_from([3, 40, 400]),
    copied=st.sampled_from([0.0, 0.05, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_sample_finds_the_threshold_that_halving_finds(
    seed: int, values: int, share: float, by_row: bool, sample: int, copied: float, dtype: torch.dtype
) -> None:
    """Whatever it says: far too few gates are looked at here, and most guesses are wrong."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(30, 20), (7, 5, 3)]
    gates = []
    for shape in shapes:
        latent = torch.randint(-values, values + 1, shape, generator=generator).to(dtype) / 8
        rows = torch.randint(1, 9, (shape[0] if by_row else 1,), generator=generator).double()
        gates.append(
            Candidates(latent, torch.ones(shape, dtype=dtype), {"price": rows.reshape(-1, *(1 for _ in shape[1:]))})
        )
    whole = sum(float(own.prices["price"].expand(own.latent.shape).sum()) for own in gates)
    halved = largest(gates, {"price": share * whole})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_threshold, "SAMPLE", sample)
        patch.setattr(weight_threshold, "COPIED", copied)
        sampled = largest(gates, {"price": share * whole})
    assert sampled == halved


def test_a_threshold_takes_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    counted = weight_threshold.cost_where
    monkeypatch.setattr(weight_threshold, "cost_where", lambda *args: passes.append(1) or counted(*args))
    monkeypatch.setattr(weight_threshold, "SAMPLE", 10_000)
    latent = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    gates = candidates([latent], [torch.ones_like(latent)], [1.0])
    top, bottom = weight_threshold.threshold(gates, {"price": 30_000}, -10.0, 10.0)
    assert int((latent > top).sum()) == 30_000 and int((latent > bottom).sum()) > 30_000
    assert len(passes) == 4  # two ends of the guess, what is above them, and the proof


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), values=st.sampled_from([0, 1, 50]), room=st.floats(0, 140))
def test_different_prices_leave_less_than_one_weight(seed: int, values: int, room: float) -> None:
    latents, weights = drawn(seed, values, torch.float32)
    gates = candidates(latents, weights, [2.0, 5.0])
    shift_(gates, largest(gates, {"price": room}))
    spent = sum(price * int((own > 0).sum()) for price, own in zip((2.0, 5.0), latents, strict=True))
    assert spent <= room
    assert room - spent < 5.0 or spent == 20 * 2.0 + 21 * 5.0


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("init", ["constant", "magnitude", "random"])
def test_finish_of_a_fresh_model_uses_the_budget_up(share: float, init: str) -> None:
    model, x = net(), torch.randn(4, 8)
    gated = tgfx.transform(model, x, granularity="weight", gate=tgfx.GateSpec(init=init))
    finished = tgfx.finish(gated, params=share)
    assert finished.after["params"] == math.floor(share * 195 + 1e-9)  # one is one weight
    assert finished.moved == 195 - finished.after["params"]
    assert sum(int((p != 0).sum()) for p in finished.model.parameters()) == finished.after["params"]
    if share == 1.0:
        torch.testing.assert_close(finished.model(x), model(x), rtol=0, atol=0)
    again = tgfx.finish(gated, params=share)
    assert again.moved == 0 and again.after == finished.after


def test_of_equal_gates_those_of_the_largest_weights_stay() -> None:
    model = net()
    gated = tgfx.transform(model, torch.randn(2, 8), granularity="weight")
    tgfx.finish(gated, params=0.5)
    sizes = torch.cat([model.get_parameter(name).detach().abs().flatten() for name in gated.gates])
    opened = torch.cat([gate.is_open().flatten() for gate in gated.gates.values()])
    assert sizes[opened].min() > sizes[~opened].max()


def test_several_budgets_are_met_at_once() -> None:
    gated = tgfx.transform(
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)),
        torch.randn(2, 1, 6, 6),
        granularity="weight",
    )
    finished = tgfx.finish(gated, params=0.5, flops=0.4)
    assert finished.ratio("params") <= 0.5 and 0.39 < finished.ratio("flops") <= 0.4


def test_every_weight_keeps_its_floor() -> None:
    gated = tgfx.transform(net(), torch.randn(2, 8), granularity="weight")
    with torch.no_grad():
        gated.gates["2.weight"].weight.mul_(1e-6)
    shift_to_(gated, {"params": 0.5}, floor=0.25)
    assert gated.gates["2.weight"].open_count() == 12  # a quarter of 48
    assert gated.gates["0.weight"].open_count() == 97 - 19 - 12  # 97 parameters are half, 19 have no gate
    with pytest.raises(BudgetError, match=r"at least 0\.1077"):
        tgfx.fit(
            gated, [torch.zeros(2, 8)], training_step=lambda g, x: g(x).sum(), budget={"params": 0.1}, progress=False
        )


def test_without_room_for_every_weight_the_largest_stay() -> None:
    gated = tgfx.transform(net(), torch.randn(2, 8), granularity="weight")
    finished = tgfx.finish(gated, params=gated.cheapest("params"))
    assert finished.after["params"] == 19 and all(gate.open_count() == 0 for gate in gated.gates.values())
