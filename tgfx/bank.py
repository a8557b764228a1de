"""All gates of a model, evaluated together once per forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tgfx.choice_gate import ChoiceGate
from tgfx.gates import TrainableGate
from tgfx.sharding import whole

Gate = TrainableGate | ChoiceGate
RECORD = "record"
GONE = -1


class GateBank(nn.Module):
    """Values of all gates laid end to end (choices last), and a constant one at the end for channels that stay.

    In a compacted model (tgfx.compact_) some slots have no gate any more: they are zero for ever. `record`, saved
    with the model, holds GONE for those and for the others at how many compactions in a row they were closed.
    """

    record: Tensor | None
    places: Tensor | None

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
            weights = torch.cat([whole(gate.weight) for gate in several])
            values = settings.trained(weights) if training else settings.binary_value(weights)
            return self._spread(torch.cat([values, *(whole(gate()) for gate in choices), one]))
        return self._spread(torch.cat([*(whole(gate()) for gate in gates), one]))

    def is_open(self) -> Tensor:
        opened = [whole(self._modules[self.key(name)].is_open()) for name in self.names]
        one = torch.ones(1, dtype=torch.bool, device=opened[0].device)
        return self._spread(torch.cat([*opened, one]))[:-1]

    def _spread(self, values: Tensor) -> Tensor:
        """One value for each slot of the model as it was transformed."""
        if "places" not in self._buffers or self.places is None or self.record is None:
            return values
        spread = torch.zeros(len(self.record) + 1, dtype=values.dtype, device=values.device)
        return spread.index_copy(0, self.places, values)

    # -- compaction -----------------------------------------------------------------------------------------

    def recorded(self) -> np.ndarray | None:
        """The record as an array, or None before the first compaction."""
        record = self._buffers.get(RECORD)
        return None if record is None else record.cpu().numpy()

    def set_record(self, record: np.ndarray) -> None:
        device = next(self.parameters()).device
        left = np.flatnonzero(record != GONE)
        self.register_buffer(RECORD, torch.from_numpy(record.astype(np.int64)).to(device))
        places = torch.from_numpy(np.append(left, len(record))).to(device) if len(left) < len(record) else None
        self.register_buffer("places", places, persistent=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Equal shapes are not enough: the same slots must have been removed."""
        own, other = self._buffers.get(RECORD), state_dict.get(prefix + RECORD)
        if own is not None and other is not None and not torch.equal(own.cpu() == GONE, other.cpu() == GONE):
            args[-1].append(f"{prefix}{RECORD}: the state is of a model from which other channels were removed")
        super()._load_from_state_dict(state_dict, prefix, *args)
