"""Models that draw random numbers in eval mode: cut all the same, and compared with draws that line up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.errors import VerificationError
from tgfx.ir.draws import StillDraws, same_draws
from tgfx.verify import compared


class Samples(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.third, self.middle = nn.Conv2d(8, 2, 1), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.middle(self.second(self.first(x).relu())).relu())


def adds_noise(x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn_like(x)


def always_drops(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


def drops_samples(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype) < 0.7)


def asks_for_a_size_first(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if x.shape[2] > 2 else x


def loops(x: Tensor) -> Tensor:
    for _ in range(x.ndim - 2):
        x = x + torch.randn_like(x)
    return x


SAMPLERS = [adds_noise, always_drops, drops_samples, asks_for_a_size_first, loops]


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("middle", SAMPLERS)
def test_cut_and_proven(middle: Callable, granularity: str) -> None:
    model = Samples(middle).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.double)
    gated = tgfx.transform(model, x, granularity=granularity).eval()
    assert gated.gates
    with torch.no_grad(), same_draws():
        expected = model(x)
    with torch.no_grad(), same_draws():
        promises.assert_close(gated(x), expected, promises.IDENTITY, "gated output")
    if granularity == "channel":
        promises.gate_at_random(gated, 0.5, 0)
    before = torch.get_rng_state(), random.getstate()
    compact = tgfx.shrink(gated).eval()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    with torch.no_grad(), StillDraws():
        promises.assert_close(compact(x), gated(x), promises.EXACT, "compact output, draws held still")


def test_while_training() -> None:
    gated = tgfx.transform(Samples(always_drops), torch.randn(2, 3, 8, 8))
    promises.gate_at_random(gated, 0.5, 0)
    tgfx.compact_(gated, torch.optim.SGD(gated.parameters(), lr=0.1), patience=0)
    assert gated.second.out_channels < 8


def test_the_error_says_so_where_nothing_can_be_proven() -> None:
    def adds_steps(x: Tensor) -> Tensor:
        return x + torch.randint_like(x, 0, 5)

    gated = tgfx.transform(Samples(adds_steps).eval(), torch.randn(2, 3, 8, 8)).eval()
    promises.gate_at_random(gated, 0.5, 0)
    with pytest.raises(VerificationError, match="draws random numbers in eval mode"):
        tgfx.shrink(gated)
    assert tgfx.shrink(gated, verify=False).second.out_channels < 8


def test_a_wrong_model_is_found_out_all_the_same() -> None:
    x = torch.randn(2, 3, 8, 8)
    for middle in (adds_noise, always_drops):
        one = Samples(middle)
        other = Samples(middle)
        assert not compared(one, other, (x,), {}).same
        other.load_state_dict(one.state_dict())
        assert compared(one, other, (x,), {}).same and compared(one, other, (x,), {}).draws
