"""The same net with each branch's last shift on its shortcut: relu(norm(…) + shift + x) = relu(norm(…) + (x + shift)).

The paper's gates stand behind convolutions, so that what batch norm adds stays when a gate closes: its shift, which is
the mean of the channel that went. A gate behind batch norm would take that away too. It costs nothing to keep.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from examples.benchmarks.resnet56 import BasicBlock


class Shift(nn.Module):
    """Adds a number to each channel."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.view(1, -1, 1, 1)


def with_shifts_on_shortcuts(model: nn.Module) -> nn.Module:
    """A copy that computes the same, to rounding."""
    model = copy.deepcopy(model)
    for block in [found for found in model.modules() if isinstance(found, BasicBlock)]:
        block.shortcut = nn.Sequential(block.shortcut, Shift(block.bn2.bias))
        with torch.no_grad():
            block.bn2.bias.zero_()
    return model


def shift_names(model: nn.Module) -> frozenset[str]:
    """The parameters that hold them; a gated model calls them the same."""
    return frozenset(f"{name}.bias" for name, module in model.named_modules() if isinstance(module, Shift))
