"""Close about half of all gates, cut without the library's own check, and compare in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises

SEEDS = range(3)


class Between(nn.Module):
    """conv -> relu -> (something over 8 channels) -> conv."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 8, 3, padding=1), middle
        with torch.no_grad():
            channels = middle(self.first(torch.zeros(2, 3, 6, 6))).shape[1]
        self.last = nn.Conv2d(channels, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


def images(batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def half_cut(model: nn.Module, example: Any, *others: Any) -> tgfx.GatedModule:
    """The gated model, after its cuts gave the same as it on the example and on other inputs."""
    model = model.double().eval()
    gated = tgfx.transform(model, example).eval()
    with torch.no_grad():
        for x in (example, *others):
            promises.assert_close(gated(x), model(x), promises.EXACT, "gated output")
    for seed in SEEDS:
        promises.gate_at_random(gated, 0.5, seed)
        compact = tgfx.shrink(gated, verify=False).eval()
        with torch.no_grad():
            for x in (example, *others):
                promises.assert_close(compact(x), gated(x), promises.EXACT, f"cut with seed {seed}")
    return gated


def channels_gated(gated: tgfx.GatedModule) -> int:
    return sum(len(gate.weight) for gate in gated.gates.values())


def kept_since(gated: tgfx.GatedModule, layer: str) -> str:
    """Why a layer's output channels are kept, with node, operator and line."""
    refusal = gated.groups[layer].frozen
    assert refusal is not None and refusal.reason and refusal.node and refusal.op and refusal.source
    return str(refusal)
