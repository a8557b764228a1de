"""Slices, parts and copies, however they are spelled, between two convolutions: found by random chains of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.half_cut import Between, channels_gated, half_cut, images
from tests.support.random_slices import chain


def _tied_halves(y: Tensor) -> Tensor:
    """The channels of a half are one atom, so it may be gone as a whole."""
    first, second = y.chunk(2, 1)
    return F.avg_pool2d(F.pixel_shuffle(torch.cat([second, first], 1), 2), 2)


def _contiguous_copy(y: Tensor) -> Tensor:
    """With one channel left the permuted tensor is contiguous as it is."""
    y = y * 1
    v = y.permute(0, 2, 3, 1).contiguous()
    v.mul_(2)
    return y + v.permute(0, 3, 1, 2)


def _changed_behind_a_copy(y: Tensor) -> Tensor:
    y = y * 1
    v = y.permute(0, 2, 3, 1).reshape(y.shape[0], y.shape[2], -1)
    y.neg_()
    return y + v.view(y.shape[0], y.shape[2], y.shape[3], -1).permute(0, 3, 1, 2)


MIDDLES = {
    "narrow from the end": lambda y: torch.cat([y.narrow(1, -2, 2), y.narrow(dim=-3, start=-8, length=3)], 1),
    "cropped and padded": lambda y: F.pad(y, (0, 0, 0, 0, -1, 2)),
    "padded and cropped": lambda y: F.pad(input=y, pad=[0, 0, 0, 0, 2, -1], value=0.5),
    "a group for each channel": lambda y: F.channel_shuffle(y, 8) * 2,
    "the same as a layer": lambda y: nn.ChannelShuffle(8)(y) * 2,
    "tied halves": _tied_halves,
    "two channels and a gate of one": lambda y: F.glu(y[:, -2:], 1),
    "a copy that is changed": lambda y: _contiguous_copy(y[:, :2]),
    "a copy of what is changed": lambda y: _changed_behind_a_copy(y[:, :2]),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_what_random_chains_found(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sigmoid(), Between(MIDDLES[name]))
    assert channels_gated(half_cut(model, images(), images(3, seed=1))) >= 3


@pytest.mark.parametrize("seed", range(30))
def test_random_chains(seed: int) -> None:
    torch.manual_seed(seed)
    half_cut(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sigmoid(), Between(chain(seed, 8))), images(), images(3, seed=1))
