"""The Accelerate example, run for real: accumulation and bfloat16 included."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("accelerate", reason="accelerate is an optional package")

from accelerate.state import AcceleratorState

import tgfx
from examples.accelerate.train import train


@pytest.mark.parametrize(("accumulate", "precision"), [(1, "no"), (4, "bf16")])
def test_the_example_meets_its_budget(accumulate: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate allows one precision in a process
    seen: list[tgfx.GatedModule] = []
    finish = tgfx.finish

    def watched(gated: tgfx.GatedModule, **budget: float) -> tgfx.Finished:
        assert type(gated.controller) is tgfx.BudgetController and gated.controller.phase == "hold"
        assert gated.controller.taken == -(-42 // accumulate)  # 1,347 images, 42 batches
        seen.append(copy.deepcopy(gated))
        return finish(gated, **budget)

    monkeypatch.setattr(tgfx, "finish", watched)
    result = train(width=6, epochs=1, batch=32, flops=0.5, accumulate=accumulate, precision=precision)
    assert 0.49 <= result.ratio("flops") <= 0.5
    (gated,) = seen
    assert (gated.ratio("flops") - result.ratio("flops")).abs().item() < 0.01  # `finish` had little left to do
