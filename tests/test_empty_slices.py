"""Slices, parts and look-ups that happen to be empty: they cost no gate, and cut models handle them too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.half_cut import Between, channels_gated, half_cut, images


def _turned(y: Tensor) -> Tensor:
    """A rotary embedding over all of a head: nothing passes it by."""
    turned, passed = y[..., :8], y[..., 8:]
    return torch.cat([turned.sin() - 1, passed], -1)


def _split(y: Tensor) -> Tensor:
    some, none = y.split([8, 0], 1)
    return torch.cat([none * 2, some], 1)


def _nothing_first(y: Tensor) -> Tensor:
    none = y[:, :0]
    return torch.cat([none.flatten(2).permute(0, 2, 1).permute(0, 2, 1).reshape(none.shape), y], 1)


MIDDLES = {
    "tail": lambda y: torch.cat([y, y[:, 8:].relu()], 1),
    "split": _split,
    "narrow": lambda y: torch.cat([y.narrow(1, 8, 0), y], 1),
    "tensor_split": lambda y: torch.cat(torch.tensor_split(y, [0, 8], 1), 1),
    "of another axis": lambda y: torch.cat([y[:, :, :0], y], 2),
    "moved while empty": _nothing_first,
    "rows that are empty, in channels": lambda y: y + y[:, :, :0].sum((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_empty_slices_between_convolutions_keep_all_gates(name: str) -> None:
    gated = half_cut(Between(MIDDLES[name]), images(), images(3, seed=1))
    assert channels_gated(gated) == 8, gated.explain("first")


class Heads(nn.Module):
    """Attention whose heads have nothing but rotated channels."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(_turned(q), _turned(k), v)
        return self.o(y.transpose(1, 2).reshape(x.shape))


def test_a_rotary_embedding_over_all_of_a_head() -> None:
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert channels_gated(half_cut(Heads(), x)) == 8 + 8  # queries with keys, and values: 8 in each head


class Experts(nn.Module):
    """A mixture of experts that looks up the tokens of each: on the example one of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(3))
        self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        chosen = self.route(x).argmax(-1)
        result = self.out(hidden)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            result = result.index_put((tokens,), expert(x[tokens]) + self.out(hidden[tokens]))
        return result


@pytest.mark.parametrize("seed", range(2))
def test_an_expert_without_tokens_keeps_its_gates(seed: int) -> None:
    torch.manual_seed(seed)
    model = Experts()
    with torch.no_grad():
        model.route.bias[2] = -100.0
    x = torch.randn(5, 4, dtype=torch.float64)
    gated = half_cut(model, x, torch.randn(7, 4, dtype=torch.float64))
    assert channels_gated(gated) == 8 + 3 * 6
    with torch.no_grad():
        model.route.bias[2] = 100.0  # now it gets all of them
    half_cut(model, x)


@pytest.mark.parametrize("index", [torch.tensor([], dtype=torch.int64), torch.zeros(6, dtype=torch.bool)])
def test_rows_picked_by_nothing(index: Tensor) -> None:
    def middle(y: Tensor) -> Tensor:
        return torch.cat([y[:, :, index], y], 2)

    assert channels_gated(half_cut(Between(middle), images())) == 8
