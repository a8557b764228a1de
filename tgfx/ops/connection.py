"""A connection between a layer and a sum that many layers share: the place where its channels get gates of their own.

    connect(x, axis, into=False)   what one layer reads of the sum:      some of its channels
    connect(y, axis, into=True)    what one branch adds to the sum:      to some of its channels

In the model as it is, and in the gated one, it gives what it was given. In the cut model it is gone, or a look-up.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tgfx.ops.registry import Recorder

_LIBRARY = torch.library.Library("tgfx", "FRAGMENT")
_LIBRARY.define("connect(Tensor(a) x, int axis, bool into) -> Tensor(a)")


def _connect(x: Tensor, axis: int, into: bool) -> Tensor:
    return torch.ops.aten.alias.default(x)


_LIBRARY.impl("connect", _connect, "CompositeImplicitAutograd")
CONNECT = torch.ops.tgfx.connect.default


def is_connection(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is CONNECT


def connected(rec: Recorder, x: Tensor, axis: int, out: Tensor) -> Tensor:
    """The rule: on the other side of a connection channels are others, so that closing one there ties nobody else.

    A channel of x that is dead must be zero: after the cut, zeros take its place. Gives the new channels.
    """
    line = rec.vector(x, axis)
    rec.read("zero", line, [(x, line)])
    fresh = rec.fresh(x.shape[axis], "connection", axis)
    others = [layer for layer in rec.ids(x).layers if layer.shape[axis] == 1]
    rec.give(out, [*others, fresh.reshape([-1 if other == axis else 1 for other in range(x.ndim)])])
    return fresh


def look_up(before: list[int], after: list[int]) -> list[int]:
    """For each position that stays behind a connection its place in what stays before it; one further where it went."""
    place = {position: index for index, position in enumerate(before)}
    return [place.get(position, len(before)) for position in after]
