"""Operands given by name are found as those given by position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.half_cut import Between, channels_gated, half_cut, images

ONE, TWO = torch.ones(8, dtype=torch.float64), torch.full((8,), 2.0, dtype=torch.float64)

FUNCTIONS = {
    "reshape": lambda y: torch.reshape(input=y, shape=(-1, 8, 6, 6)),
    "chunk": lambda y: torch.cat(tensors=torch.chunk(input=y, chunks=2, dim=1)[::-1], dim=1),
    "split": lambda y: torch.cat(torch.split(tensor=y, split_size_or_sections=[3, 5], dim=1), 1),
    "tensor_split": lambda y: torch.cat(torch.tensor_split(input=y, sections=3, dim=1), 1),
    "narrow": lambda y: torch.cat([torch.narrow(input=y, dim=1, start=2, length=4)] * 2, 1),
    "unflatten": lambda y: torch.unflatten(input=y, dim=1, sizes=(2, 4)).flatten(1, 2),
    "flatten": lambda y: torch.flatten(input=y, start_dim=2).reshape(y.shape),
    "repeat_interleave": lambda y: torch.repeat_interleave(input=y[:, :4], repeats=2, dim=1),
    "transpose": lambda y: torch.transpose(input=y, dim0=2, dim1=3),
    "pad": lambda y: F.pad(input=y, pad=(0, 0, 0, 0, 2, 1), value=0.5),
    "layer_norm": lambda y: F.layer_norm(input=y.movedim(1, 3), normalized_shape=(8,)).movedim(3, 1),
    "group_norm": lambda y: F.group_norm(input=y, num_groups=2),
    "batch_norm": lambda y: F.batch_norm(input=y, running_mean=ONE.to(y), running_var=TWO.to(y)),
    "max_pool2d": lambda y: F.max_pool2d(input=y, kernel_size=2, stride=1),
    "interpolate": lambda y: F.interpolate(input=y, scale_factor=2),
    "relu": lambda y: F.relu(input=y - 0.1, inplace=True),
    "softmax over space": lambda y: F.softmax(input=y.flatten(2), dim=2).reshape(y.shape),
    "add": lambda y: torch.add(input=y, other=y.sigmoid(), alpha=2),
    "where": lambda y: torch.where(condition=y > 0, input=y, other=y.exp()),
    "mean over channels": lambda y: y - torch.mean(input=y, dim=1, keepdim=True),
    "matmul": lambda y: torch.matmul(input=y.movedim(1, 3), other=y.new_ones(8, 8)).movedim(3, 1),
    "attention": lambda y: F.scaled_dot_product_attention(
        query=y.flatten(2).mT, key=y.flatten(2).mT * 2, value=y.flatten(2).mT
    ).mT.reshape(y.shape),
    "getitem": lambda y: y[:, 1:7].reshape(shape=(-1, 6, 6, 6)),
    "method": lambda y: y.view(size=(-1, 2, 4, 6, 6)).flatten(start_dim=1, end_dim=2).narrow(dim=1, start=0, length=5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_called_by_name(name: str) -> None:
    gated = half_cut(
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sigmoid(), Between(FUNCTIONS[name])), images(), images(2, seed=1)
    )
    assert channels_gated(gated) > 3, gated.explain("2.first")


class Layers(nn.Module):
    """Layers, and functions of their weights, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.mixed = nn.Parameter(torch.randn(8, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(input=self.norm(input=self.first(input=x)))
        y = F.conv2d(input=self.second(input=y), weight=self.mixed, padding=1)
        return F.linear(weight=self.out.weight, bias=self.out.bias, input=y.mean(dim=(2, 3)))


def test_layers_called_by_name() -> None:
    gated = half_cut(Layers(), images(), images(3, seed=1))
    assert channels_gated(gated) >= 16
