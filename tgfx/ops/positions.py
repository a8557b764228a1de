"""Operators that go by positions along an axis: what is left of a cut axis has others.

tril(x)[i, j] = x[i, j] if j <= i else 0        right for what is left, if rows and columns lose the same positions
unfold(x)[w] = x[w * step : w * step + size]    windows over fewer channels are other windows
"""

from __future__ import annotations

import torch

from tgfx.ops.movement import move
from tgfx.ops.registry import Call, register


@register("tril", "triu")
def triangle(call: Call) -> None:
    rec, x = call.rec, call.args[0]
    diagonal = call.arg(1, "diagonal", 0)
    if not _keeps_all(call.name, x.shape, diagonal):
        # orders survive a cut (j <= i, j < i), distances do not (j <= i + 2)
        of_order = diagonal in ((0, -1) if call.name == "tril" else (0, 1))
        _tie_positions(call, x, -2, -1, possible=of_order)
    rec.give(call.out, rec.ids(x).layers, like=x)


@register("diagonal")
def diagonal(call: Call) -> None:
    x = call.args[0]
    dims = call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)
    _tie_positions(call, x, *dims, possible=call.arg(1, "offset", 0) == 0)
    move(call)


@register("unfold")
def windows(call: Call) -> None:
    x = call.args[0]
    for layer in call.rec.ids(x).on_axis(call.arg(1, "dimension")):
        call.rec.freeze(layer, "is read in windows along its channels", limit=True)
    move(call)


def _keeps_all(name: str, shape: torch.Size, diagonal: int) -> bool:
    return diagonal >= shape[-1] - 1 if name == "tril" else diagonal <= 1 - shape[-2]


def _tie_positions(call: Call, x: torch.Tensor, one: int, other: int, *, possible: bool) -> None:
    """The same position of two axes goes as one channel; what cannot be tied so is kept."""
    rec, axes = call.rec, {one % x.ndim, other % x.ndim}
    layers = {axis: rec.ids(x).on_axis(axis) for axis in axes}
    alone = [layer for layers_there in layers.values() for layer in layers_there if layer.numel() == max(layer.shape)]
    everywhere = [layer for layers_there in layers.values() for layer in layers_there]
    if possible and x.shape[one] == x.shape[other] and all(layers.values()) and len(alone) == len(everywhere):
        for layer in alone[1:]:
            rec.unite(alone[0].reshape(-1), layer.reshape(-1))
        return
    for layer in everywhere:
        rec.freeze(layer, f"is compared by position with another axis in {call.name}", limit=True)
