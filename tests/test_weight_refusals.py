"""granularity="weight": what is chosen and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.weight_models import (
    close_at_random,
    made,
)
from tgfx.errors import BudgetError, GranularityError, InputError, NothingToGateError, StrictError

# -- choices and refusals --------------------------------------------------------------------------------------


def test_ignore_and_explain() -> None:
    _, gated, _ = made("convolutions", ignore=["two", nn.Linear])
    assert set(gated.gates) == {"one.weight", "three.weight", "depth.weight", "up.weight"}
    assert "ignored" in gated.explain("two") and "one gate per entry" in gated.explain("one.weight")
    assert gated.groups["out.weight"].frozen is not None
    with pytest.raises(InputError, match="nothing to explain"):
        gated.explain("nowhere")
    _, tied, _ = made("tied", ignore="second")  # a tied weight is ignored under any of its names
    assert set(tied.gates) == {"embedding.weight", "matrix"}
    assert "head.weight" in tied.explain("embedding")


def test_refusals() -> None:
    model, gated, x = made("convolutions")
    with pytest.raises(GranularityError, match="round_to"):
        tgfx.shrink(gated, round_to=8)
    with pytest.raises(GranularityError, match="save_sparse"):
        tgfx.save_plan(gated, "nowhere")
    for call in (lambda: gated.cost("channels"), lambda: gated.budget_loss(channels=0.5), lambda: gated.total("x")):
        with pytest.raises(BudgetError, match="flops, flops_all, params"):
            call()
    for mixed in (["channel", "weight"], "weight+channel"):
        with pytest.raises(GranularityError, match=r"mixed|unknown"):
            tgfx.transform(model, x, granularity=mixed)
    with pytest.raises(NothingToGateError):
        tgfx.transform(nn.Sequential(nn.BatchNorm1d(4)), torch.randn(2, 4), granularity="weight")


class Boxed(nn.Module):
    """An LSTM is called as it is; its matrices keep their entries."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def test_closed_boxes_are_kept_with_a_reason() -> None:
    model, x = Boxed().eval(), torch.randn(2, 4, 6)
    gated = tgfx.transform(model, x, granularity="weight").eval()
    assert set(gated.gates) == {"out.weight"}
    close_at_random(gated, 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))
    assert gated.groups["lstm.weight_ih_l0"].frozen is not None


class Resized(nn.Module):
    """The size of the output is an argument of the call: such a call is left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x), output_size=[8, 8])


def test_calls_with_more_than_an_input_are_kept() -> None:
    model, x = Resized().eval(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x, granularity="weight").eval()
    assert set(gated.gates) == {"down.weight"}
    assert "ConvTranspose2d, which is called as it is" in gated.explain("up.weight")
    close_at_random(gated, 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))
    with pytest.raises(StrictError, match="ConvTranspose2d"):
        tgfx.transform(model, x, granularity="weight", strict=True)
