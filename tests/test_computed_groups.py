"""Sizes and groups that are computed from the batch are computed in the cut model too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.half_cut import channels_gated, half_cut, images


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


class Modulated(Base):
    """StyleGAN2: every sample has weights of its own, so groups = batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.style = nn.Conv2d(8, 8, 3), nn.Linear(8, 8)

    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        weight = self.conv.weight[None] * self.style(y.mean((2, 3)))[:, None, :, None, None]
        z = F.conv2d(y.reshape(1, b * c, h, w), weight.reshape(b * 8, c, 3, 3), padding=1, groups=b)
        return z.view(b, 8, h, w)


class Conditional(Base):
    """CondConv: weights are mixed of a few, sample by sample; groups given by position."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.route = nn.Parameter(torch.randn(4, 8 * 8 * 9) / 9), nn.Linear(8, 4)

    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        weight = (self.route(y.mean((2, 3))).sigmoid() @ self.weights).view(b * 8, 8, 3, 3)
        return F.conv2d(y.reshape(1, b * c, h, w), weight, None, 1, 1, 1, b).view(b, 8, h, w)


class Correlated(Base):
    """Depthwise cross-correlation (SiamRPN++): groups = batch * channels."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Conv2d(8, 8, 1)

    def middle(self, y: Tensor) -> Tensor:
        k, (b, c, h, w) = self.key(y)[:, :, 2:5, 2:5], y.shape
        z = F.conv2d(y.reshape(1, -1, h, w), k.reshape(-1, 1, 3, 3), groups=b * c, padding=1)
        return z.view(b, -1, h, w)


class GroupsOfTheKernel(Correlated):
    """The same, with the groups read from the kernel."""

    def middle(self, y: Tensor) -> Tensor:
        k, (b, _, h, w) = self.key(y)[:, :, 2:5, 2:5].reshape(-1, 1, 3, 3), y.shape
        return F.conv2d(y.reshape(1, -1, h, w), k, groups=k.size(0), padding=1).view(b, -1, h, w)


class ShapeOfTheKernel(Correlated):
    def middle(self, y: Tensor) -> Tensor:
        k, (b, _, h, w) = self.key(y)[:, :, 2:5, 2:5].reshape(-1, 1, 3, 3), y.shape
        count, _, height, _ = k.shape
        return F.conv2d(y.reshape(1, -1, h, w), k, groups=count, padding=height // 2).view(b, -1, h, w)


class InstanceNorm(Base):
    def middle(self, y: Tensor) -> Tensor:
        b, c, h, w = y.shape
        return F.group_norm(y.reshape(1, b * c, h, w), b * c).view(b, c, h, w)


MODELS = {
    Modulated: 16, Conditional: 4, Correlated: 8, GroupsOfTheKernel: 8, ShapeOfTheKernel: 8, InstanceNorm: 8,
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_the_cut_works_at_every_batch_that_the_model_works_at(kind: type[Base], batch: int) -> None:
    torch.manual_seed(0)
    gated = half_cut(kind(), images(batch), images(1, seed=1), images(2, seed=2), images(5, seed=3))
    assert channels_gated(gated) == MODELS[kind]


def test_many_samples_are_groups_too() -> None:
    half_cut(Correlated(), images(20), images(2, seed=1))
