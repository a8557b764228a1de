"""A branch without a living channel goes with its add; where a constant would stay behind it is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tgfx.errors import EmptyGroupError


class PreActivation(nn.Module):
    """stem -> x + c2(relu(b1(c1(relu(b0(x)))))) -> linear; the branch ends without a shift."""

    def __init__(self, *, bias: bool = False, norm_after: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.b0, self.b1 = nn.BatchNorm2d(8), nn.BatchNorm2d(12)
        self.c1 = nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.c2 = nn.Conv2d(12, 8, 3, padding=1, bias=bias)
        self.after = nn.BatchNorm2d(8) if norm_after else nn.Identity()
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.after(self.c2(torch.relu(self.b1(self.c1(torch.relu(self.b0(x)))))))
        return self.out(x.mean((2, 3)))


def _gated(**options: bool) -> tgfx.GatedModule:
    torch.manual_seed(0)
    gated = tgfx.transform(PreActivation(**options).double(), torch.randn(2, 3, 6, 6).double()).eval()
    gated.gates["c1"].set_open_(torch.zeros(12, dtype=torch.bool))
    gated.gates["stem"].set_open_(torch.arange(8) % 2 == 0)
    return gated


def test_the_branch_goes_with_its_add() -> None:
    gated = _gated()
    compact = tgfx.shrink(gated).eval()
    x = torch.randn(3, 3, 6, 6).double()
    torch.testing.assert_close(compact(x), gated(x), rtol=1e-12, atol=1e-12)
    assert "add" not in compact.code
    assert [name for name, _ in compact.named_parameters()] == ["stem.weight", "stem.bias", "out.weight", "out.bias"]


def test_its_price_goes_too() -> None:
    gated = _gated()
    compact = tgfx.shrink(gated).eval()
    with FlopCounterMode(display=False) as counter:
        compact(torch.randn(2, 3, 6, 6).double())
    assert float(gated.cost("flops")) * 2 == counter.get_total_flops()
    assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())
    assert float(gated.cost("channels")) == 4 + 5


@pytest.mark.parametrize("options", [{"bias": True}, {"norm_after": True}], ids=["bias", "batch norm"])
def test_a_constant_left_behind_is_an_error(options: dict[str, bool]) -> None:
    with pytest.raises(EmptyGroupError, match="all 12 gates of group 'c1' are closed"):
        tgfx.shrink(_gated(**options))


def test_the_trunk_cannot_go() -> None:
    gated = _gated()
    gated.gates["stem"].set_open_(torch.zeros(8, dtype=torch.bool))
    with pytest.raises(EmptyGroupError):
        tgfx.shrink(gated)


class Written(nn.Module):
    """x + (something written into c2(relu(c1(x)))), or into one of the two after their sum."""

    def __init__(self, write: Callable[[torch.Tensor], object], *, after: bool = False) -> None:
        super().__init__()
        self.write, self.after = write, after
        self.stem, self.c1 = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 1)
        self.c2, self.out = nn.Conv2d(12, 8, 1, bias=False), nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.c2(torch.relu(self.c1(x)))
        if not self.after:
            self.write(y)
        z = x + y
        if self.after:
            self.write(y)
        return self.out(z + y)


def _row(y: torch.Tensor) -> None:
    y[:, :, 0] = 0.7


def _written(write: Callable[[torch.Tensor], object], after: bool) -> tuple[tgfx.GatedModule, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6).double()
    gated = tgfx.transform(Written(write, after=after).double(), x).eval()
    gated.gates["c1"].set_open_(torch.zeros(12, dtype=torch.bool))
    return gated, x


SHIFTS = {"cos_": lambda y: y.cos_(), "add_ in a view": lambda y: y.view(-1).add_(0.5), "a row": _row}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", SHIFTS.values(), ids=SHIFTS)
def test_what_is_written_into_a_branch_stays_behind(write: Callable[[torch.Tensor], object], after: bool) -> None:
    gated, _ = _written(write, after)
    with pytest.raises(EmptyGroupError, match="all 12 gates of group 'c1' are closed"):
        tgfx.shrink(gated, verify=False)


@pytest.mark.parametrize("after", [False, True])
def test_a_write_that_keeps_zeros_goes_along(after: bool) -> None:
    gated, x = _written(lambda y: y.relu_(), after)
    compact = tgfx.shrink(gated, verify=False).eval()
    torch.testing.assert_close(compact(x), gated(x), rtol=1e-12, atol=1e-12)
    assert [name for name, _ in compact.named_parameters()] == ["stem.weight", "stem.bias", "out.weight", "out.bias"]
