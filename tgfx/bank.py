"""All gates of a model, evaluated together once per forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgfx.gates import TrainableGate
from tgfx.sharding import whole


class GateBank(nn.Module):
    """Values of all gates laid end to end, and a constant one at the end for channels that stay."""

    def __init__(self, gates: dict[str, TrainableGate]) -> None:
        super().__init__()
        self.names = list(gates)
        for name, gate in gates.items():
            self.add_module(self.key(name), gate)

    @staticmethod
    def key(name: str) -> str:
        return name.replace(".", "/")  # a module name may not hold a dot

    def gates(self) -> dict[str, TrainableGate]:
        return {name: self._modules[self.key(name)] for name in self.names}  # type: ignore[misc]

    def forward(self) -> Tensor:
        gates = [self._modules[self.key(name)] for name in self.names]
        first = gates[0]
        settings, training = first.settings, first.training
        one = torch.ones(1, dtype=first.weight.dtype, device=first.weight.device)
        if all(gate.settings == settings and gate.training == training for gate in gates):
            weights = torch.cat([whole(gate.weight) for gate in gates])
            values = settings.trained(weights) if training else settings.binary_value(weights)
            return torch.cat([values, one])
        return torch.cat([*(whole(gate()) for gate in gates), one])

    def is_open(self) -> Tensor:
        return torch.cat([whole(self._modules[self.key(name)].is_open()) for name in self.names])
