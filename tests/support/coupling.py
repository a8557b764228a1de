"""Small nets from a function and its layers, and which weights of theirs are tied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tgfx

IMAGE = torch.zeros(2, 3, 8, 8)
TOKENS = torch.zeros(2, 6, 5)


class Net(nn.Module):
    """Layers by name, and a forward given as a function of (layers, input)."""

    def __init__(self, forward, **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def groups(forward, x: Tensor = IMAGE, **layers) -> dict[frozenset[str], int]:
    """Members of every gated group -> its number of atoms."""
    gated = tgfx.transform(Net(forward, **layers), x)
    return {frozenset(map(str, g.members)): g.size for g in gated.groups.values() if g.frozen is None}


def members(*names: str) -> frozenset[str]:
    return frozenset(names)


def conv(c_in: int, c_out: int, kernel: int = 1, **options) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel, bias=False, **options)


def linear(c_in: int, c_out: int) -> nn.Linear:
    return nn.Linear(c_in, c_out, bias=False)
