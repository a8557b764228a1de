"""What counts as the same up to rounding depends on the precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.promises import gate_at_random
from tgfx.errors import VerificationError
from tgfx.ir.compare import Precision, close

ACCEPTED = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
REFUSED = {torch.float64: 1e-7, torch.float32: 3e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize("dtype", ACCEPTED, ids=str)
def test_by_precision(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, 0.0], dtype=dtype)
    assert close(a, torch.tensor([1.0, ACCEPTED[dtype]], dtype=dtype))
    assert not close(a, torch.tensor([1.0, REFUSED[dtype]], dtype=dtype))


def test_a_coarser_type_on_the_way() -> None:
    a, b = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64) + 1e-6
    assert not close(a, b)
    assert not close(a, b, torch.float64)
    assert close(a, b, torch.float32)
    assert not close(a, b + 1e-3, torch.bfloat16)  # nothing becomes as loose as a rounding of bfloat16


def test_precision_is_that_of_the_model_and_of_what_it_rounds_to() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with Precision([x]) as exact:
        x * torch.ones(2, dtype=torch.float64) + torch.ones(1).double()
    with Precision([x]) as rounded:
        x.float().exp().double()
    assert exact.coarsest is torch.float64
    assert rounded.coarsest is torch.float32
    assert Precision([x, torch.ones(1)]).coarsest is torch.float32


class Norm(nn.Module):
    """In float32 whatever it is given, as Llama normalises."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_float32_part_of_a_float64_model_is_no_wrong_cut() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), Norm(), nn.Linear(64, 64), Norm(), nn.Linear(64, 3)).double().eval()
    gated = tgfx.transform(model, torch.randn(4, 8, dtype=torch.float64))
    gate_at_random(gated, 0.5, 0)
    tgfx.shrink(gated)
    tgfx.compact_(gated)


def test_a_small_mistake_in_float64_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double().eval()
    gated = tgfx.transform(model, torch.randn(4, 8, dtype=torch.float64))
    gate_at_random(gated, 0.5, 0)
    right = tgfx.shrinking.cut

    def wrong(*args: object) -> nn.Module:
        compact = right(*args)
        with torch.no_grad():
            next(compact.parameters()).mul_(1 + 1e-5)
        return compact

    monkeypatch.setattr(tgfx.shrinking, "cut", wrong)
    with pytest.raises(VerificationError):
        tgfx.shrink(gated)
