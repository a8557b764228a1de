"""Layers of identities that cross two axes, brought onto one (a helper of `channels`).

What survives of such a layer need not be rectangular, and only a rectangle can be cut out of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tgfx.ir.facts import NodeIds, Shuffle
from tgfx.ir.ids import IdSpace, distinct_along
from tgfx.ir.refusal import Refusal


def settle_joint_layers(space: IdSpace, nodes: Mapping[str, NodeIds], shuffles: Iterable[Shuffle]) -> bool:
    """Whether identities were united. Not inside a shuffle, which the cut can replace as a whole."""
    changed = False
    inside = set().union(*(shuffle.inside for shuffle in shuffles))
    for name, known in nodes.items():
        for ids in () if name in inside else known.tensors:
            for layer in ids.layers if ids else ():
                if sum(size > 1 for size in layer.shape) > 1:
                    changed |= _settle(space, name, layer)
    return changed


def _settle(space: IdSpace, name: str, layer: torch.Tensor) -> bool:
    """The axis with most identities keeps them; along the others they become one."""
    roots = space.find(layer.numpy())
    varying = [
        a for a in range(layer.ndim)
        if layer.shape[a] > 1 and not (roots == roots.take([0], axis=a)).all()
    ]  # fmt: skip
    if len(varying) < 2:
        return False
    keep = max(varying, key=lambda a: (distinct_along(space, layer, a), a))
    place = Refusal("tied", name, "reshape across axes", "")
    line = layer
    for axis in range(layer.ndim):
        if axis != keep:
            line = line.narrow(axis, 0, 1)
    return space.unite(layer.numpy(), line.expand(layer.shape).numpy(), place)
