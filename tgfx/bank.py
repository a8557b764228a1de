"""All gates of a model, evaluated together once per forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgfx.choice_gate import ChoiceGate
from tgfx.gates import TrainableGate
from tgfx.ir.constants import Constants, beside
from tgfx.sharding import whole

Gate = TrainableGate | ChoiceGate
RECORD = "record"
GONE = -1


_TAKEN = ("names", "elementwise", "constants", "training")  # attributes of every bank


class GateBank(Constants):
    """Values of all gates laid end to end (choices last), and a constant one at the end for channels that stay.

    In a compacted model (tgfx.compact_) some slots have no gate any more: they are zero for ever. `record`, saved
    with the model, holds GONE for those and for the others at how many compactions in a row they were closed.
    `places` are the slots that have a gate, and the one at the end.
    """

    record: np.ndarray | None = None
    places: Tensor | None = None

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
        own = name.replace(".", "/")  # a module name may not hold a dot
        return f"{own}/" if own in _TAKEN or hasattr(GateBank, own) else own  # nor be that of something else in here

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
        if self.places is None or self.record is None:
            return values
        spread = torch.zeros(len(self.record) + 1, dtype=values.dtype, device=values.device)
        return spread.index_copy(0, beside(self.places, values), values)

    # -- compaction -----------------------------------------------------------------------------------------

    def recorded(self) -> np.ndarray | None:
        """The record, or None before the first compaction."""
        return self.record

    def set_record(self, record: np.ndarray) -> None:
        self.record = record.astype(np.int64)
        left = np.flatnonzero(record != GONE)
        places = None
        if len(left) < len(record):
            places = torch.from_numpy(np.append(left, len(record))).to(next(self.parameters()).device)
        self.keep_constant("places", places)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """With a copy of the record, so that whoever averages states in place leaves the model's own alone."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.record is not None:
            destination[prefix + RECORD] = torch.from_numpy(self.record.copy())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Equal shapes are not enough: the same slots must have been removed."""
        key, own = prefix + RECORD, self.record
        parts = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if own is None:  # a record is then a key that is not expected
            super()._load_from_state_dict(state_dict, prefix, *parts)
            return
        super()._load_from_state_dict({k: v for k, v in state_dict.items() if k != key}, prefix, *parts)
        if key not in state_dict:
            missing_keys.append(key)
            return
        other = state_dict[key].cpu().numpy()
        if np.array_equal(own == GONE, other == GONE):
            self.set_record(other)
        else:
            error_msgs.append(f"{key}: the state is of a model from which other channels were removed")
