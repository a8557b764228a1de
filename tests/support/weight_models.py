"""Models for gates on single weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx

KINDS = ("flops", "flops_all", "params")


class Convolutions(nn.Module):
    """1-d, 2-d, 3-d, transposed, grouped, depthwise, padded by reflection, with norms in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv1d(4, 6, 3, groups=2), nn.Conv3d(2, 3, 2)
        self.two = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.bn = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(torch.relu(self.bn(self.two(x))))
        y = self.up(y)
        line = self.one(y.flatten(2))
        box = self.three(y.reshape(len(y), 2, 2, *y.shape[2:]))
        return self.out(y.mean((2, 3))) + line.mean() + box.square().mean()


class Tied(nn.Module):
    """One weight in two layers, an embedding that is also the output layer, a weight used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(self.embedding(x))))
        return self.head(y + F.linear(y, self.matrix) + torch.matmul(y, self.matrix))


class Attention(nn.Module):
    """in_proj_weight is used in three parts, of different length each: keys are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        short = x[:, ::2]
        return self.out(self.norm(x + self.attention(x, short, short, need_weights=False)[0]))


MODELS = {
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 6, 6, dtype=torch.float64)),
    "tied": (Tied, lambda: torch.randint(0, 11, (2, 5))),
    "attention": (Attention, lambda: torch.randn(2, 6, 8, dtype=torch.float64)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, **options) -> tuple[nn.Module, tgfx.GatedModule, Tensor]:
    torch.manual_seed(0)
    kind, example = MODELS[name]
    model, x = kind().double().eval(), example()
    return model, tgfx.transform(model, x, granularity="weight", **options), x


def close_at_random(gated: tgfx.GatedModule, density: float, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():
        gate.set_open_(torch.rand(gate.weight.shape, generator=generator) < density)


def kept_entries(model: nn.Module) -> int:
    return sum(int((p != 0).sum()) for p in model.parameters())


def randomised(model: nn.Module) -> nn.Module:
    """No parameter entry is zero by itself."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.where(parameter == 0, 0.1, 0.0))
    return model
