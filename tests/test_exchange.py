"""Budgets with few and dear gates are used up: one gate opens for another that costs less."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tgfx
from tests.support.training import small_gated
from tgfx.training.exchange import NEAR
from tgfx.training.selection import Prices

GATED = small_gated(8)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.25, 0.95))
def test_finish_leaves_nothing_that_an_exchange_could_use(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for gate in GATED.gates.values():
        with torch.no_grad():  # all open, in a random order
            gate.weight.copy_(torch.rand(len(gate.weight), generator=generator) + 0.01)
    finished = tgfx.finish(GATED, flops=share, verify=False)
    assert finished.ratio("flops") <= share
    prices, opened = Prices(GATED), torch.from_numpy(GATED.open_slots())
    if share - finished.ratio("flops") <= NEAR:
        return
    for new in (~opened).nonzero().flatten():
        for old in opened.nonzero().flatten():
            trial = opened.clone()
            trial[new], trial[old] = True, False
            emptied = any(not trial[torch.from_numpy(GATED.gate_slots(name))].any() for name in GATED.gates)
            assert emptied or not finished.ratio("flops") + 1e-9 < prices.ratio("flops", trial) <= share
