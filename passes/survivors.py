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
        self._cache: dict[int, tuple[torch.Tensor, tuple[int, np.ndarray] | None]] = {}

    def kept(self, ids: TensorIds) -> list[np.ndarray | None]:
        """Per axis the positions that stay, or None where all do."""
        masks: dict[int, np.ndarray] = {}
        for layer in ids.layers:
            found = self._line(layer)
            if found is not None:
                axis, alive = found
                masks[axis] = masks[axis] & alive if axis in masks else alive
        return [np.flatnonzero(masks[a]) if a in masks else None for a in range(len(ids.shape))]

    def kept_of(self, ids: TensorIds, present: Survivors | None) -> list[np.ndarray | None]:
        """The same for a tensor that was cut to `present` before: positions in what is there."""
        kept = self.kept(ids)
        if present is None:
            return kept
        return [_places(now, before) for now, before in zip(kept, present.kept(ids), strict=True)]

    def _line(self, layer: torch.Tensor) -> tuple[int, np.ndarray] | None:
        """(axis, living positions) of a layer, or None if nothing of it is cut."""
        key = id(layer)
        if key not in self._cache:
            self._cache[key] = (layer, self._compute(layer))
        return self._cache[key][1]

    def _compute(self, layer: torch.Tensor) -> tuple[int, np.ndarray] | None:
        ids = layer.numpy()
        alive = self.alive_of_id[ids]
        if alive.all():
            return None
        roots = self.space.find(ids)
        varying = [a for a in range(ids.ndim) if ids.shape[a] > 1 and not (roots == roots.take([0], axis=a)).all()]
        if len(varying) != 1:
            raise AssertionError(f"survivors of a layer that varies along axes {varying} are not rectangular")
        line = np.moveaxis(alive, varying[0], 0).reshape(alive.shape[varying[0]], -1)[:, 0]
        return varying[0], line


def _places(kept: np.ndarray | None, before: np.ndarray | None) -> np.ndarray | None:
    if before is None:
        return kept
    if kept is None or not np.isin(kept, before).all():
        raise AssertionError("a cut cannot bring back what an earlier one removed")
    return None if len(kept) == len(before) else np.searchsorted(before, kept)
