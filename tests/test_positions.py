"""Operators that go by positions along an axis: exact where orders survive a cut, otherwise the channels are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support.half_cut import Between, channels_gated, half_cut, images, kept_since
from tgfx.errors import StrictError

SIZE = 12


class Weighted(nn.Module):
    """A weight of 12 x 12 that is masked before it is used, in the middle of others."""

    def __init__(self, masked: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.start, self.first, self.last = nn.Linear(6, 7), nn.Linear(7, SIZE), nn.Linear(SIZE, 3)
        self.weight, self.masked = nn.Parameter(torch.randn(SIZE, SIZE)), masked

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.start(x).sigmoid()))
        return self.last(torch.relu(F.linear(y, self.masked(self.weight))))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ORDERS = {
    "made": lambda w: w.tril(),
    "strict": lambda w: torch.tril(w, -1),
    "upper": lambda w: w.triu(1) + 2 * w.triu(diagonal=0),
    "lu": lambda w: w.tril(-1) @ w.triu() / 4,
    "a mask made in the graph": lambda w: w * w.new_ones(SIZE, SIZE).tril(),
    "diagonal": lambda w: w.t() * w.diagonal()[:, None],
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_and_columns_of_a_triangle_go_together(name: str) -> None:
    gated = half_cut(Weighted(ORDERS[name]), rows(), rows(1))
    assert channels_gated(gated) == 7 + SIZE, gated.explain("first")


DISTANCES = {
    "band": lambda w: w.tril(2),
    "far": lambda w: w.triu(-3),
    "next diagonal": lambda w: w * F.pad(w.diagonal(1), (0, 1))[:, None],
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_between_positions_are_kept(name: str) -> None:
    gated = half_cut(Weighted(DISTANCES[name]), rows())
    assert channels_gated(gated) == 7
    with pytest.raises(StrictError, match="compared by position"):
        tgfx.transform(Weighted(DISTANCES[name]).double(), rows(), strict=True)


def test_a_triangle_that_leaves_all_of_its_matrix_ties_nothing() -> None:
    gated = half_cut(Weighted(lambda w: w.tril(SIZE - 1).triu(1 - SIZE)), rows())
    assert channels_gated(gated) == 7 + SIZE + SIZE


class Tokens(nn.Module):
    """Tokens and channels are compared by position."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.first, self.last = nn.Linear(6, 7), nn.Linear(7, SIZE), nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(self.start(x).sigmoid())).triu(1))


def test_a_triangle_of_tokens_and_channels_keeps_the_channels() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    gated = half_cut(Tokens(), x)
    assert channels_gated(gated) == 7
    assert "triu" in kept_since(gated, "first")


class Causal(nn.Module):
    """Learned queries that see the earlier ones only: a mask made of ones, over axes that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(SIZE, 6))
        self.key, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries
        scores = (q @ self.key(q).t()).masked_fill(q.new_ones(SIZE, SIZE).triu(1).bool(), -9.0)
        return self.last((scores.sigmoid() @ q).sum(0)) * x[:, :3]


def test_a_causal_mask_leaves_what_it_masks_as_free_as_it_was() -> None:
    gated = half_cut(Causal(), rows(), rows(1))
    assert channels_gated(gated) == SIZE + 6


def _windows(y: Tensor) -> Tensor:
    return y.unfold(1, 4, 4).sum(1).permute(0, 3, 1, 2)


def _sliding(y: Tensor) -> Tensor:
    return y.unfold(1, 3, 1).mean(-1)


@pytest.mark.parametrize("middle", [_windows, _sliding])
def test_windows_over_channels_keep_them(middle: Callable[[Tensor], Tensor]) -> None:
    gated = half_cut(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sigmoid(), Between(middle)), images())
    assert channels_gated(gated) == 3
    assert "windows" in kept_since(gated, "2.first")


def test_windows_over_space_cost_no_gate() -> None:
    gated = half_cut(
        Between(lambda y: y.unfold(2, 2, 2).unfold(3, 3, 3).mean((4, 5))), torch.randn(2, 3, 12, 12).double()
    )
    assert channels_gated(gated) == 8
