"""What a cut leaves along the axes of every node's value: what the rules of tgfx.ops.resize ask for."""

from __future__ import annotations

import numpy as np
import torch
from torch import fx

from tgfx.ir.facts import ChannelMap
from tgfx.passes.survivors import Survivors


class KeptPositions:
    """Sizes before the cut and positions that stay, by node; looked up once for each."""

    def __init__(self, channels: ChannelMap, survivors: Survivors) -> None:
        self.channels, self.survivors = channels, survivors
        self._kept: dict[tuple[str, int], list[np.ndarray | None]] = {}

    def is_tensor(self, node: fx.Node) -> bool:
        known = self.channels.nodes.get(node.name)
        return known is not None and len(known.tensors) == 1 and node.name not in self.channels.containers

    def before(self, node: fx.Node, index: int = 0) -> tuple[int, ...]:
        ids = self.channels.nodes[node.name].tensors[index]
        if ids is None:
            raise IndexError(index)
        return ids.shape

    def kept(self, node: fx.Node, axis: int, index: int = 0) -> list[int] | None:
        key = (node.name, index)
        if key not in self._kept:
            ids = self.channels.nodes[node.name].tensors[index]
            self._kept[key] = self.survivors.kept(ids) if ids is not None else []
        found = self._kept[key][axis] if self._kept[key] else None
        return None if found is None else found.tolist()

    def repeats(self, node: fx.Node, axis: int) -> bool:
        """Whether the same channels come more than once along an axis, as where all samples lie side by side."""
        ids = self.channels.nodes[node.name].single
        for layer in ids.on_axis(axis) if ids is not None else ():
            line = layer.movedim(axis, 0).reshape(layer.shape[axis], -1)
            if len(torch.unique(line, dim=0)) < len(line):
                return True
        return False

    def seen(self, node: fx.Node) -> tuple[tuple, dict]:
        return self.channels.seen_args[node.name]

    def groups(self, node: fx.Node, before: int) -> int:
        """Groups that are left of a grouped convolution or GroupNorm."""
        if self.channels.grouping.get(node.name) != "within":
            return before
        x = node.args[0] if node.args else node.kwargs["input"]
        kept = self.kept(x, 1)  # type: ignore[arg-type]
        return before if kept is None else before * len(kept) // self.before(x)[1]  # type: ignore[arg-type]

    def left(self, node: fx.Node, axis: int) -> list[int]:
        """Positions along an axis that stay, where that is all of them too."""
        kept = self.kept(node, axis)
        return list(range(self.before(node)[axis])) if kept is None else kept
