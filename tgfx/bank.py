"""All gates of a model, evaluated together once per forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgfx.choice_gate import ChoiceGate
from tgfx.gates import TrainableGate

Gate = TrainableGate | ChoiceGate


class GateBank(nn.Module):
    """Values of all gates laid end to end (choices last), and a constant one at the end for channels that stay."""

    def __init__(self, gates: dict[str, Gate]) -> None:
        super().__init__()
        self.names = list(gates)
        self.elementwise = sum(isinstance(gate, TrainableGate) for gate in gates.values())
        if any(isinstance(gate, ChoiceGate) for gate in list(gates.values())[: self.elementwise]):
            raise AssertionError("gates of choices come last")
        for name, gate in gates.items():
            self.add_module(self.key(name), gate)

    @staticmethod
    def key(name: str) -> str:
        return name.replace(".", "/")  # a module name may not hold a dot

    def gates(self) -> dict[str, Gate]:
        return {name: self._modules[self.key(name)] for name in self.names}  # type: ignore[misc]

    def forward(self) -> Tensor:
        gates = [self._modules[self.key(name)] for name in self.names]
        first, several, choices = gates[0], gates[: self.elementwise], gates[self.elementwise :]
        settings, training = first.settings, first.training
        one = torch.ones(1, dtype=first.weight.dtype, device=first.weight.device)
        if several and all(gate.settings == settings and gate.training == training for gate in several):
            weights = torch.cat([gate.weight for gate in several])
            values = settings.trained(weights) if training else settings.binary_value(weights)
            return torch.cat([values, *(gate() for gate in choices), one])
        return torch.cat([*(gate() for gate in gates), one])

    def is_open(self) -> Tensor:
        return torch.cat([self._modules[self.key(name)].is_open() for name in self.names])
