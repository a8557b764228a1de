"""Norms that are limited (max_norm, renorm): what they are taken over is kept, the rest is as free as ever."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support.half_cut import channels_gated, half_cut
from tgfx.errors import StrictError


class Words(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.hidden, self.out = table, nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(torch.relu(self.table(words)))))


class Functional(nn.Module):
    """The same as a function of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 12))

    def forward(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.weight, None, 1.0, 1.0)


FIRST, OTHERS = torch.arange(10)[None], torch.arange(10, 20)[None]


@pytest.mark.parametrize("seen", [False, True], ids=["fresh", "has seen the example"])
@pytest.mark.parametrize("table", [nn.Embedding(20, 12, max_norm=1.0), Functional()], ids=["layer", "function"])
def test_columns_of_an_embedding_with_max_norm_are_kept(table: nn.Module, seen: bool) -> None:
    model = Words(copy.deepcopy(table)).double()
    if seen:
        model(FIRST)
    gated = half_cut(model, FIRST, OTHERS)
    assert channels_gated(gated) == 9
    with pytest.raises(StrictError, match="max_norm"):
        tgfx.transform(model, FIRST, strict=True)


def test_other_embeddings_keep_their_gates() -> None:
    assert channels_gated(half_cut(Words(nn.Embedding(20, 12)), FIRST, OTHERS)) == 12 + 9


class Limited(nn.Module):
    """A weight whose rows (dim 0) or columns (dim 1) have a norm of at most one half."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.first, self.last = dim, nn.Linear(6, 7), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, 7))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.renorm(self.weight, 2, self.dim, 0.5)
        return self.last(torch.relu(F.linear(torch.relu(self.first(x)), weight)))


@pytest.mark.parametrize(("dim", "free"), [(0, 8), (1, 7)])
def test_what_renorm_measures_is_kept(dim: int, free: int) -> None:
    gated = half_cut(Limited(dim), torch.randn(4, 6, dtype=torch.float64))
    assert channels_gated(gated) == free
    with pytest.raises(StrictError, match="renorm"):
        tgfx.transform(Limited(dim), torch.randn(4, 6), strict=True)
