"""The price of convolutions and matrix products whose samples or rows hold channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support.latency_tables import smooth, table_for
from tests.support.promises import CONV_AND_LINEAR, EXACT, assert_close, gate_at_random, price_as_polynomial

Apply = Callable[[Tensor, Tensor], Tensor]


class Between(nn.Module):
    """`apply` with a constant kernel, between two layers."""

    def __init__(self, apply: Apply, kernel: tuple[int, ...], learned: bool) -> None:
        super().__init__()
        self.a, self.z, self.apply = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), apply
        if learned:
            self.k = nn.Parameter(torch.randn(kernel))
        else:
            self.register_buffer("k", torch.randn(kernel))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.z(self.apply(h, self.k).view(h.shape))


def blurred(h: Tensor, k: Tensor) -> Tensor:
    b, c, height, width = h.shape
    return F.conv2d(h.reshape(b * c, 1, height, width), k, padding=1).view(b, c, height, width)


def rows_blurred(h: Tensor, k: Tensor) -> Tensor:
    return F.conv1d(h.reshape(-1, 1, h.shape[-1]), k, padding=1)


APPLIED: dict[str, tuple[Apply, tuple[int, ...]]] = {
    "conv2d": (blurred, (1, 1, 3, 3)),
    "conv2d, flattened": (lambda h, k: F.conv2d(h.flatten(0, 1).unsqueeze(1), k, padding=1), (1, 1, 3, 3)),
    "conv2d, without a batch": (lambda h, k: F.conv2d(h.flatten(0, 1)[:, None], k, None, 1, 1), (1, 1, 3, 3)),
    "conv2d of what has space": (
        lambda h, k: F.conv2d(h.transpose(0, 1).reshape(-1, 1, 4, 4), k, padding=1),
        (1, 1, 3, 3),
    ),
    "conv1d": (lambda h, k: F.conv1d(h.flatten(0, 1).flatten(1)[:, None], k, padding=1), (1, 1, 3)),
    "conv1d of rows": (rows_blurred, (1, 1, 3)),
    "conv transposed": (lambda h, k: F.conv_transpose2d(h.flatten(0, 1)[:, None], k, padding=1), (1, 1, 3, 3)),
    "conv of rows as channels": (lambda h, k: F.conv1d(h.flatten(0, 1), k, padding=1), (4, 4, 3)),
    "depthwise over rows": (lambda h, k: F.conv1d(h.flatten(0, 1), k, padding=1, groups=4), (4, 1, 3)),
    "grouped over rows": (lambda h, k: F.conv1d(h.flatten(0, 1), k, padding=1, groups=2), (4, 2, 3)),
    "mm": (lambda h, k: h.reshape(-1, 4) @ k, (4, 4)),
    "linear": (F.linear, (4, 4)),
    "addmm": (lambda h, k: torch.addmm(k[0], h.reshape(-1, 4), k), (4, 4)),
}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", APPLIED)
def test_price(name: str, batch: int, learned: bool) -> None:
    torch.manual_seed(0)
    model = Between(*APPLIED[name], learned).double().eval()
    x = torch.randn(batch, 3, 4, 4, dtype=torch.float64)
    gated = tgfx.transform(model, x).eval()
    for seed in range(4):
        if seed:
            gate_at_random(gated, 0.4, seed)
        compact = tgfx.shrink(gated).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            found = compact(x)
        counted = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}
        with torch.no_grad():
            assert_close(found, gated(x), EXACT, "the cut model")
        flops = sum(n for op, n in counted.items() if op in CONV_AND_LINEAR)
        assert float(gated.cost("flops")) * batch == flops, (counted, gated.cost_expr("flops"))
        assert float(gated.cost("flops_all")) * batch == sum(counted.values()), counted
        price_as_polynomial(gated)


def test_price_of_the_report() -> None:
    """A kernel over single channels: three of eight are left of it too."""
    torch.manual_seed(0)
    gated = tgfx.transform(Between(blurred, (1, 1, 3, 3), False).eval(), torch.randn(1, 3, 4, 4)).eval()
    gated.gates["a"].set_open_(torch.arange(8) < 3)
    assert float(gated.cost("flops")) == 3648
    assert str(gated.cost_expr("flops")) == "1216*n[a]"


def test_measured_time_of_samples_that_hold_channels() -> None:
    """A table knows the layer with all its samples; with fewer it takes a share of that."""
    torch.manual_seed(0)
    gated = tgfx.transform(Between(blurred, (1, 1, 3, 3), False).eval(), torch.randn(1, 3, 4, 4)).eval()
    gated.use_latency(table_for(gated, smooth))
    whole = float(gated.cost("latency"))
    gated.gates["a"].set_open_(torch.arange(8) < 4)
    a, k, z = (1e-4 * (100 + ins * outs) for ins, outs in ((3, 8), (1, 1), (8, 2)))
    left = sum(1e-4 * (100 + ins * outs) for ins, outs in ((3, 4), (4, 2))) + k / 2
    assert whole == pytest.approx(a + k + z)
    assert float(gated.cost("latency")) == pytest.approx(left)
