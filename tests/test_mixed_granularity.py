"""Channels, heads and layers under gates of their own in one model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support import promises

KINDS = ("channel", "head", "layer")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(1))


MIXTURES = [mix for size in (2, 3) for mix in itertools.combinations(KINDS, size)]


@pytest.mark.parametrize("mixture", MIXTURES, ids="+".join)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_mixture_is_cut_exactly(mixture: tuple[str, ...], seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Net().double().eval(), torch.randn(3, 7, 6, dtype=torch.float64)
    gated = tgfx.transform(model, x[:1], granularity=mixture).eval()
    assert {group.kind for group in gated.groups if group.frozen is None} == set(mixture)
    promises.assert_close(gated(x).detach(), model(x).detach(), 1e-12, "identity")
    dice = np.random.default_rng(seed)
    for name, gate in gated.gates.items():
        opened = torch.from_numpy(dice.random(gate.weight.numel()) < 0.6)
        if gated.groups[name].kind != "layer" and not opened.any():
            opened[0] = True  # a biased layer cannot lose all of its channels
        gate.set_open_(opened)
    compact = tgfx.shrink(gated)
    with torch.no_grad():
        promises.assert_close(compact(x), gated(x), 1e-10, "cut")
    assert gated.cost("params").item() == sum(parameter.numel() for parameter in compact.parameters())


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_budget_over_all_kinds_is_met(share: float) -> None:
    """Branches, heads and channels compete; the cheapest loss per FLOP goes first."""
    torch.manual_seed(0)
    gated = tgfx.transform(Net(), torch.randn(1, 7, 6), granularity=KINDS).train()
    optimizer = torch.optim.AdamW(tgfx.param_groups(gated, lr=1e-3))
    for _ in range(40):
        x = torch.randn(16, 7, 6)
        loss = F.cross_entropy(gated(x), (x.sum((1, 2)) > 0).long()) + gated.budget_loss(flops=share, steps=40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert share - 0.01 <= gated.eval().ratio("flops").item() <= share
    tgfx.shrink(gated)
