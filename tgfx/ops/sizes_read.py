"""Sizes that a model reads from a cut axis: they stay the original ones, at any batch.

x.shape[1] ** -0.5    ->    16 ** -0.5        x had 16 channels before the cut
k.size(0) // 8        ->    the size now, scaled back, where samples and channels share the axis
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from tgfx.ops.cutting import Cut, is_single_tensor, size_after
from tgfx.ops.naming import op_name


def read_size(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """x.size(), x.size(i), x.shape: cut axes keep answering their original size."""
    if op_name(node) == "getattr" and node.args[1] != "shape":
        return copy
    x = node.args[0]
    if not is_single_tensor(cut, x):
        return copy
    shape = cut.before(x)  # type: ignore[arg-type]
    if all(cut.kept(x, axis) is None for axis in range(len(shape))):  # type: ignore[arg-type]
        return copy
    args, kwargs = cut.seen(node)
    dim = args[1] if len(args) > 1 and op_name(node) == "size" else kwargs.get("dim")
    if dim is not None:
        return copy if cut.kept(x, dim % len(shape)) is None else _original(cut, x, dim % len(shape), copy)  # type: ignore[arg-type]
    sizes = []
    with cut.graph.inserting_after(copy):
        for axis in reversed(range(len(shape))):  # each is put right after the call
            now = None
            if cut.kept(x, axis) is None or _may_hold_samples(cut, x, axis):
                now = cut.graph.call_function(operator.getitem, (copy, axis))
            sizes.append(now if cut.kept(x, axis) is None else _original(cut, x, axis, now))  # type: ignore[arg-type]
    return tuple(reversed(sizes))


def _original(cut: Cut, x: Any, axis: int, now: fx.Node | None) -> Any:
    """The size before the cut: a number, unless samples share the axis with channels, and there may be more of them."""
    before = cut.before(x)[axis]
    if now is None or not _may_hold_samples(cut, x, axis):
        return before
    after = size_after(cut, x, axis)
    shared = math.gcd(before, after)
    with cut.graph.inserting_after(now):
        up = cut.graph.call_function(operator.mul, (now, before // shared))
    with cut.graph.inserting_after(up):
        return cut.graph.call_function(operator.floordiv, (up, after // shared))


def _may_hold_samples(cut: Cut, x: Any, axis: int) -> bool:
    """Whether the axis may be longer at another batch: seen on the example, or its size was left to a reshape."""
    if cut.repeats(x, axis) or op_name(x) in ("flatten", "ravel"):
        return True
    if op_name(x) not in ("view", "reshape") or any(isinstance(value, torch.dtype) for value in x.args):
        return False
    given = x.args[1:] or tuple(x.kwargs.values())
    sizes = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
    return len(sizes) == len(cut.before(x)) and (isinstance(sizes[axis], fx.Node) or sizes[axis] == -1)


def read_numel(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    x = node.args[0]
    shape = cut.before(x)  # type: ignore[arg-type]
    after = [size_after(cut, x, axis) for axis in range(len(shape))]  # type: ignore[arg-type]
    if list(shape) == after:
        return copy
    with cut.graph.inserting_after(copy):
        up = cut.graph.call_function(operator.mul, (copy, math.prod(shape)))
    with cut.graph.inserting_after(up):
        return cut.graph.call_function(operator.floordiv, (up, math.prod(after)))
