"""What a block of a random model is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DECONV = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
DIMS = {"line": 1, "image": 2, "volume": 3, "sequence": 0, "tokens": 0}
EXTENT = {"line": 8, "image": 8, "volume": 4, "sequence": 6, "tokens": 6}
CHANNELED = ("line", "image", "volume")
TOKENED = ("sequence", "tokens")
VOCABULARY, CLASSES, FEATURES = 11, 3, 5

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "tanh": torch.tanh,
    # f(0) != 0: a dead channel does not stay zero behind these
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp": lambda x: torch.exp(0.2 * torch.tanh(x)),
    "cos": torch.cos,
}


class Block(nn.Module):
    """Keeps the shape unless it says otherwise through `out` (channels) and `extent` (positions per axis)."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__()
        self.out, self.extent = c, extent


@dataclass(frozen=True)
class Blueprint:
    make: Callable[..., Block]
    families: tuple[str, ...]
    options: dict[str, tuple[Any, ...]]
    halves: bool  # needs, and halves, an extent of at least 4

    def variants(self) -> list[dict[str, Any]]:
        """One setting of the options each, so that every value of every option appears."""
        longest = max([len(v) for v in self.options.values()] or [1])
        return [{k: v[i % len(v)] for k, v in self.options.items()} for i in range(longest)]


BLOCKS: dict[str, Blueprint] = {}


def block(*families: str, halves: bool = False, **options: tuple[Any, ...]) -> Callable[[type[Block]], type[Block]]:
    def register(cls: type[Block]) -> type[Block]:
        BLOCKS[cls.__name__] = Blueprint(cls, families, options, halves)
        return cls

    return register


def conv(d: int, c_in: int, c_out: int, kernel: int = 3, **options: Any) -> nn.Module:
    return CONV[d](c_in, c_out, kernel, padding=kernel // 2, **options)
