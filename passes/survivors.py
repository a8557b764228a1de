"""Which positions of every tensor are left after a cut."""

from __future__ import annotations

import numpy as np
import torch

from tgfx.ir.facts import ChannelMap, TensorIds
from tgfx.passes.couple import Coupling


class Survivors:
    """Positions that stay, per tensor axis, for one assignment of open slots."""

    def __init__(self, channels: ChannelMap, coupling: Coupling, open_slots: np.ndarray) -> None:
        self.space = channels.space
        alive = np.append(open_slots.astype(bool), True)  # the last slot is the constant one
        self.alive_of_id = alive[coupling.slot_of_id]
        self._cache: dict[int, tuple[torch.Tensor, dict[int, np.ndarray] | None]] = {}

    def kept(self, ids: TensorIds) -> list[np.ndarray | None]:
        """Per axis the positions that stay, or None where all do."""
        masks: dict[int, np.ndarray] = {}
        for layer in ids.layers:
            lines = self._lines(layer)
            if lines is None:
                raise AssertionError(f"survivors of a layer of shape {tuple(layer.shape)} are not rectangular")
            for axis, alive in lines.items():
                masks[axis] = masks[axis] & alive if axis in masks else alive
        return [np.flatnonzero(masks[a]) if a in masks else None for a in range(len(ids.shape))]

    def kept_of(self, ids: TensorIds, present: Survivors | None) -> list[np.ndarray | None]:
        """The same for a tensor that was cut to `present` before: positions in what is there."""
        kept = self.kept(ids)
        if present is None:
            return kept
        return [_places(now, before) for now, before in zip(kept, present.kept(ids), strict=True)]

    def is_rectangular(self, ids: TensorIds) -> bool:
        """Whether what stays is a choice of positions along each axis (inside a shuffle it need not be)."""
        return all(self._lines(layer) is not None for layer in ids.layers)

    def _lines(self, layer: torch.Tensor) -> dict[int, np.ndarray] | None:
        """Living positions by axis, for the axes where some are dead; None if they are not rectangular."""
        key = id(layer)
        if key not in self._cache:
            self._cache[key] = (layer, self._compute(layer))
        return self._cache[key][1]

    def _compute(self, layer: torch.Tensor) -> dict[int, np.ndarray] | None:
        ids = layer.numpy()
        alive = self.alive_of_id[ids]
        if alive.all():
            return {}
        if not alive.any():  # which axis is empty follows from where the atoms differ
            roots = self.space.find(ids)
            varying = [a for a in range(ids.ndim) if not (roots == roots.take([0], axis=a)).all()]
            varying = varying or [a for a in range(ids.ndim) if ids.shape[a] > 1]  # they are one atom, all of them
            return {a: np.zeros(ids.shape[a], dtype=bool) for a in varying}
        lines = {a: alive.any(axis=tuple(b for b in range(ids.ndim) if b != a)) for a in range(ids.ndim)}
        rectangle = np.ones_like(alive)
        for axis, line in lines.items():
            rectangle &= line.reshape([-1 if a == axis else 1 for a in range(ids.ndim)])
        if not np.array_equal(rectangle, alive):
            return None
        return {axis: line for axis, line in lines.items() if not line.all()}


def _places(kept: np.ndarray | None, before: np.ndarray | None) -> np.ndarray | None:
    if before is None:
        return kept
    places = None if kept is None else np.searchsorted(before, kept)  # both rise
    if places is None or (places == len(before)).any() or not np.array_equal(before[places], kept):
        raise AssertionError("a cut cannot bring back what an earlier one removed")
    return None if len(places) == len(before) else places
