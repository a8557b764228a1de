"""Models for the viewer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut: seven nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class Residual(nn.Module):
    """A stem, stages of blocks, a head."""

    def __init__(self, stages: int = 2, blocks: int = 1, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.stages = nn.Sequential(
            *(nn.Sequential(*(Block(width) for _ in range(blocks))) for _ in range(stages)),
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


EXAMPLE = (1, 3, 6, 6)
LARGE = {"stages": 10, "blocks": 29, "width": 4}  # 2,000 nodes and a few

EVIL = ("</script><script>window['taken']=1</script>", "<img src=x onerror=alert(1)>", "\u2028\"'&")


class Evil(nn.Module):
    """Modules whose names want to be markup."""

    def __init__(self) -> None:
        super().__init__()
        for name in EVIL:
            self.add_module(name, nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for name in EVIL:
            x = self._modules[name](x)  # type: ignore[misc]
        return self.head(x)


def close_some_(gated: nn.Module, share: float = 0.5, seed: int = 0) -> None:
    """Close gates at random; one of each group stays."""
    generator = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():  # type: ignore[operator, union-attr]
        mask = torch.rand(gate.weight.shape, generator=generator) > share
        mask[0] = True
        gate.set_open_(mask)
