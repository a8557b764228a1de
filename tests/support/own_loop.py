"""A loop as users write it, and a small model for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx

X = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))
Y = X[:, :5].argmax(1)
GRANULARITIES = ["channel", "weight"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


def gated_mlp(granularity: str = "channel", **options) -> tgfx.GatedModule:
    return tgfx.transform(mlp(), X[:2], granularity=granularity, **options).train()


def sgd(gated: tgfx.GatedModule, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(tgfx.param_groups(gated, lr=0.05, **options))


def train(
    gated: nn.Module, optimizer: torch.optim.Optimizer, steps: int, penalty: Callable[[int], Tensor], first: int = 0
) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (F.cross_entropy(gated(X), Y) + penalty(step)).backward()
        optimizer.step()


def ratio(gated: tgfx.GatedModule, kind: str = "params") -> float:
    return gated.eval().ratio(kind).item()
