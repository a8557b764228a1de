"""Attention whose rows are told apart by position: learned queries, of which a causal mask lets none go."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, assert_close, gate_at_random

Attend = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Learned queries over the tokens of the input, pooled; heads: None for attention without an axis of heads."""

    def __init__(self, attend: Attend, heads: int | None, queries: int = 7) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.queries = nn.Parameter(torch.randn(1, queries, 8))
        self.k, self.v, self.out = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)
        self.register_buffer("mask", torch.rand(queries, 7) < 0.6)
        self.mask[:, 0] = True
        self.bias = nn.Parameter(torch.randn(queries, 7))

    def parted(self, x: Tensor) -> Tensor:
        return x if self.heads is None else x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.parted(t) for t in (self.queries.expand(x.shape[0], -1, -1), self.k(x), self.v(x)))
        y = self.attend(self, q, k, v)
        return self.out((y if self.heads is None else y.transpose(1, 2).flatten(2)).relu().mean(1))


ATTEND: dict[str, Attend] = {
    "causal": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "causal, by position": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
    "mask": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask),
    "learned mask": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias),
    "mask of one row": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask[2:3]),
    "all": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v),
}
ROWS_STAY = {"causal", "causal, by position"}


@pytest.mark.parametrize("heads", [None, 1, 2])
@pytest.mark.parametrize("queries", [7, 5])
@pytest.mark.parametrize("how", ATTEND)
def test_learned_queries(how: str, queries: int, heads: int | None) -> None:
    torch.manual_seed(0)
    net = Net(ATTEND[how], heads, queries).double().eval()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    gated = tgfx.transform(net, x)
    rows = {str(axis) for group in gated.groups.values() for axis in group.members} & {"queries[1]"}
    assert not rows or how not in ROWS_STAY
    assert rows or how != "all"
    for seed in range(2):
        gate_at_random(gated, 0.5, seed)
        gated.eval()
        with torch.no_grad():
            assert_close(tgfx.shrink(gated, verify=False).eval()(x), gated(x), EXACT, "the cut model")
