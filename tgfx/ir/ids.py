"""Channel identities: who is which channel, and who must live and die together.

Every axis of every parameter, buffer and constant starts with fresh integer ids. Uniting two ids says that
the two channels are one atom. Id 0 is special: it stands for data that has no identity (image rows, batch
entries), so whatever is united with 0 is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tgfx.ir.refusal import Refusal

FROZEN = 0


class IdSpace:
    """A vectorised union-find over ids that remembers who owns an id, what tied it and what froze it."""

    def __init__(self) -> None:
        self._parent = np.zeros(1024, dtype=np.int64)
        self._owner = np.full(1024, -1, dtype=np.int64)
        self.size = 1
        self.owners: list[object] = []
        # (owner a, owner b) -> the places that tie them, in the order met
        self.ties: dict[tuple[int, int], list[Refusal]] = {}
        self.refusals: dict[int, list[Refusal]] = {}

    def fresh(self, count: int, owner: object) -> np.ndarray:
        """`count` new ids that belong to `owner`."""
        return self.fresh_lines([count], [owner])

    def fresh_lines(self, counts: Sequence[int], owners: Sequence[object]) -> np.ndarray:
        """New ids for several owners, one line after the other."""
        start, self.size = self.size, self.size + sum(counts)
        if self.size > len(self._parent):
            grown = max(self.size, 2 * len(self._parent))
            self._parent = np.resize(self._parent, grown)
            self._owner = np.resize(self._owner, grown)
        ids = np.arange(start, self.size, dtype=np.int64)
        self._parent[start : self.size] = ids
        first = len(self.owners)
        self._owner[start : self.size] = np.repeat(np.arange(first, first + len(owners)), counts)
        self.owners.extend(owners)
        return ids

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The representative of each id (the smallest id of its atom)."""
        parent = self._parent
        first = roots = parent[ids]
        while True:
            above = parent[roots]
            if not np.count_nonzero(above != roots):  # faster than .all() on short vectors
                break
            roots = above
        if roots is not first:
            parent[ids] = roots
        return roots

    def unite(self, a: np.ndarray, b: np.ndarray, place: Refusal | None = None) -> bool:
        """Make aligned entries of `a` and `b` one atom; says whether anything changed."""
        if a.shape != b.shape:
            a, b = np.broadcast_arrays(a, b)
        a, b = a.reshape(-1), b.reshape(-1)
        if a.size == 0:
            return False
        if place is not None:
            self._remember(a, b, place)
        changed = False
        while True:
            ra, rb = self.find(a), self.find(b)
            different = ra != rb
            if not np.count_nonzero(different):
                return changed
            changed = True
            low, high = np.minimum(ra, rb)[different], np.maximum(ra, rb)[different]
            np.minimum.at(self._parent, high, low)

    def freeze(self, ids: np.ndarray, refusal: Refusal) -> bool:
        """Keep these channels for ever, and record why."""
        ids = ids.reshape(-1)
        live = ids[self.find(ids) != FROZEN] if ids.size else ids
        if live.size == 0:
            return False
        for owner in np.unique(self._owner[live]):
            reasons = self.refusals.setdefault(int(owner), [])
            if refusal not in reasons:
                reasons.append(refusal)
        return self.unite(live, np.zeros_like(live))

    def is_frozen(self, ids: np.ndarray) -> np.ndarray:
        return self.find(ids) == FROZEN

    def all_frozen(self, ids: np.ndarray) -> bool:
        """Whether all of these are kept; mostly the first of them says no."""
        if ids.size:
            root = ids.item(0)
            while (above := self._parent.item(root)) != root:
                root = above
            if root != FROZEN:
                return False
        return bool(self.is_frozen(ids).all())

    def owner_indices(self, ids: np.ndarray) -> np.ndarray:
        return self._owner[ids]

    def _remember(self, a: np.ndarray, b: np.ndarray, place: Refusal) -> None:
        left_owner, right_owner = self._owner[a], self._owner[b]
        several = np.count_nonzero(left_owner != left_owner[0]) or np.count_nonzero(right_owner != right_owner[0])
        if not several:
            pairs = [(int(left_owner[0]), int(right_owner[0]))]
        else:
            count = len(self.owners) + 1
            keys = np.unique((left_owner + 1) * count + right_owner + 1)
            pairs = [(key // count - 1, key % count - 1) for key in keys.tolist()]
        for left, right in pairs:
            if left == right or left < 0 or right < 0:
                continue
            places = self.ties.setdefault((min(left, right), max(left, right)), [])
            if len(places) < 4 and place not in places:
                places.append(place)


def all_in(wanted: np.ndarray, line: np.ndarray) -> bool:
    """Whether all wanted ids are on the line; mostly it is the very same line, or another range of ids."""
    if wanted.shape == line.shape and not np.count_nonzero(wanted != line):
        return True
    if wanted.max() < line.min() or wanted.min() > line.max():
        return False
    return bool(np.isin(wanted, line).all())


def distinct_along(space: IdSpace, layer: torch.Tensor, axis: int) -> int:
    """How many atoms one meets walking along `axis` of a layer."""
    line = layer
    for other in range(layer.ndim):
        if other != axis:
            line = line.narrow(other, 0, 1)
    return len(np.unique(space.find(line.reshape(-1).numpy())))


def squeezed_atoms(space: IdSpace, layer: torch.Tensor) -> torch.Tensor:
    """Shrink a layer that crosses axes to size 1 on every axis along which its atoms are the same."""
    if sum(size > 1 for size in layer.shape) < 2:
        return layer
    roots = torch.from_numpy(space.find(layer.numpy()))
    for axis in range(layer.ndim):
        if layer.shape[axis] > 1 and bool((roots == roots.narrow(axis, 0, 1)).all()):
            layer, roots = layer.narrow(axis, 0, 1), roots.narrow(axis, 0, 1)
    return layer


class LooseIds(IdSpace):
    """Ids that are handed out and followed, but never tied or frozen."""

    def unite(self, a: np.ndarray, b: np.ndarray, place: Refusal | None = None) -> bool:
        return False

    def freeze(self, ids: np.ndarray, refusal: Refusal) -> bool:
        return False


def collapse(
    space: IdSpace, layer: torch.Tensor, keep: int, place: Refusal, unite: Callable[..., bool] | None = None
) -> torch.Tensor:
    """Unite a layer along every axis but `keep`, so that its survivors are a plain slice of that axis."""
    line = layer
    for axis in range(layer.ndim):
        if axis != keep:
            line = line.narrow(axis, 0, 1)
    (unite or space.unite)(layer.numpy(), line.expand(layer.shape).numpy(), place)
    return line
