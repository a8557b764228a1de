"""Rewriting calls that are given a shape (view, expand, unflatten, view_as ...) for smaller operands.

x.view(b, 8, -1)        8 channels, 5 are left        ->  x.view(b, 5, -1)
x.expand_as(y)          y is left with others than x  ->  x.expand(y.size(0), 5, ...)
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx, nn

from tgfx.ops.cutting import Cut, size_after
from tgfx.ops.naming import op_name


def scaled(cut: Cut, size: Any, before: int, after: int) -> Any:
    """A size argument for an axis that went from `before` to `after`."""
    if before == after or (isinstance(size, int) and size == -1):
        return size
    if isinstance(size, int):
        return after
    shared = math.gcd(before, after)
    up = cut.graph.call_function(operator.mul, (size, after // shared))
    return cut.graph.call_function(operator.floordiv, (up, before // shared))


def reshape(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    name = op_name(node)
    x, rest = copy.args[0], list(copy.args[1:])
    kwargs = dict(copy.kwargs)
    if name == "unflatten":
        dim = rest[0] if rest else kwargs["dim"]
        seen, by_name = cut.seen(node)
        given = rest[1] if len(rest) > 1 else kwargs["sizes"]
        sizes = one_by_one(cut, given, seen[2] if len(seen) > 2 else by_name["sizes"], copy)
        offset = dim % len(cut.before(node.args[0]))  # type: ignore[arg-type]
    else:
        if rest and isinstance(rest[0], torch.dtype):
            return copy
        key = next((k for k in ("size", "shape", "sizes") if k in kwargs), None)
        given = kwargs.pop(key) if key else (rest[0] if len(rest) == 1 else rest)
        args, by_name = cut.seen(node)
        sizes = one_by_one(cut, given, args[1] if len(args) > 1 else next(iter(by_name.values())), copy)
        offset = len(cut.before(node)) - len(sizes)
    with cut.graph.inserting_before(copy):
        sizes = _scaled_sizes(cut, node, copy, sizes, offset)
    if name == "unflatten":
        copy.args = (x, dim, sizes)
        copy.kwargs = {}
    elif copy.op == "call_method":
        copy.args = (x, *sizes)
        copy.kwargs = {}
    else:
        copy.args = (x, sizes)
        copy.kwargs = {}
    return copy


def unflatten_module(cut: Cut, node: fx.Node, copy: fx.Node, module: nn.Unflatten) -> Any:
    """nn.Unflatten may be called in several places, each with survivors of its own: a call of the function there."""
    shape = cut.before(node)
    first = module.dim % (len(shape) - len(module.unflattened_size) + 1)
    axes = range(first, first + len(module.unflattened_size))
    if all(cut.kept(node, axis) is None for axis in axes):
        return copy
    sizes = [size_after(cut, node, axis) for axis in axes]
    with cut.graph.inserting_before(copy):
        return cut.graph.call_function(torch.unflatten, (copy.args[0], first, sizes))


def _scaled_sizes(cut: Cut, node: fx.Node, copy: fx.Node, sizes: list[Any], offset: int) -> list[Any]:
    before, after = cut.before(node), [size_after(cut, node, axis) for axis in range(len(cut.before(node)))]
    found = [scaled(cut, size, before[offset + i], after[offset + i]) for i, size in enumerate(sizes)]
    left_out = next((i for i, size in enumerate(sizes) if isinstance(size, int) and size == -1), None)
    if left_out is not None and 0 in after:  # torch cannot tell it of nothing
        others = [size for i, size in enumerate(sizes) if i != left_out]
        size = _floordiv(cut, _size_before(cut, node, copy, offset), others)
        found[left_out] = scaled(cut, size, before[offset + left_out], after[offset + left_out])
    return found


def _size_before(cut: Cut, node: fx.Node, copy: fx.Node, offset: int) -> list[Any]:
    """Of the axes that are reshaped, as they would be without the cut."""
    x = node.args[0]
    ndim = len(cut.before(x))  # type: ignore[arg-type]
    axes = range(offset, offset + 1) if op_name(node) == "unflatten" else range(ndim)
    return [
        cut.graph.call_method("size", (copy.args[0], axis)) if cut.kept(x, axis) is None else cut.before(x)[axis]  # type: ignore[arg-type]
        for axis in axes
    ]


def _floordiv(cut: Cut, factors: list[Any], divisors: list[Any]) -> Any:
    size: Any = 1
    for function, numbers in ((operator.mul, factors), (operator.floordiv, divisors)):
        for number in numbers:
            plain = isinstance(size, int) and isinstance(number, int)
            size = function(size, number) if plain else cut.graph.call_function(function, (size, number))
    return size


def as_other(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """x.expand_as(y), x.view_as(y), x.reshape_as(y): y may be left with other channels than x."""
    other = node.args[1] if len(node.args) > 1 else node.kwargs["other"]
    before = cut.before(node)
    if all(cut.kept(node, axis) == cut.kept(other, axis) for axis in range(len(before))):  # type: ignore[arg-type]
        return copy
    smaller = copy.args[1] if len(copy.args) > 1 else copy.kwargs["other"]
    with cut.graph.inserting_before(copy):
        sizes = []
        for axis, size in enumerate(before):
            now = cut.graph.call_method("size", (smaller, axis))
            full = scaled(cut, now, size_after(cut, other, axis), size)  # type: ignore[arg-type]
            sizes.append(scaled(cut, full, size, size_after(cut, node, axis)))
        method = op_name(node).removesuffix("_as")
        return cut.graph.call_method(method, (copy.args[0], *sizes))


def one_by_one(cut: Cut, given: Any, seen: Any, copy: fx.Node) -> list[Any]:
    """Sizes as a list, also where the call got a single number or a whole shape computed elsewhere."""
    if isinstance(given, list | tuple):
        return list(given)
    if not isinstance(seen, list | tuple):
        return [given]
    with cut.graph.inserting_before(copy):
        return [cut.graph.call_function(operator.getitem, (given, axis)) for axis in range(len(seen))]
