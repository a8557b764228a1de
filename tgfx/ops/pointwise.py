"""Pointwise operators: aligned elements are one channel.

    out[i] = f(a[i], b[i])      a's ids ~ b's ids, out carries them

An operand of size 1 on an axis is a broadcast and ties nothing there. An operand that has an extent but no
identity (image rows, batch entries) freezes what it meets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tgfx.ops.registry import Call, register

# Pointwise in fact, but without torch.Tag.pointwise.
UNTAGGED = (
    "hardswish", "_prelu_kernel", "copy", "native_dropout", "dropout", "bernoulli", "uniform", "normal",
    "exponential", "fill", "zero", "clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy",
    "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "masked_fill", "where", "clamp", "rrelu_with_noise", "log_sigmoid_forward", "nan_to_num", "isnan", "isinf",
    "to", "type_as", "complex", "polar", "_neg_view", "_neg_view_copy", "_conj", "conj_physical", "lerp", "frexp",
    "_assert_tensor_metadata",
)  # fmt: skip

# Operators through which a zero stays a zero (used to find what a gate may be multiplied to).
KEEPS_ZERO = {"clone", "_to_copy", "detach", "alias", "contiguous", "to", "neg"}
SCALES = {"mul", "div"}


@register(*UNTAGGED)
def pointwise(call: Call) -> None:
    rec, outs = call.rec, call.outputs()
    inputs = [t for t in call.tensors() if t.ndim > 0]
    if not outs:
        return
    if len(inputs) == 1 or all(t is inputs[0] for t in inputs):
        layers = rec.ids(inputs[0]).layers if inputs else ()
    else:
        layers = _merged(call, inputs, outs[0].shape)
    like = None
    scalar_scale = call.name in SCALES and all(t.ndim == 0 for t in call.tensors()[1:])
    if inputs and (call.name in KEEPS_ZERO or scalar_scale):
        like = inputs[0]
    for out in outs:
        if out.ndim == 0:
            continue
        aligned = tuple(align(layer, out.ndim) for layer in layers)
        rec.give(out, [layer for layer in aligned if fits(layer, out.shape)], like=like)


def align(layer: torch.Tensor, ndim: int) -> torch.Tensor:
    """Prepend size-1 axes, as broadcasting does."""
    return layer.reshape((1,) * (ndim - layer.ndim) + tuple(layer.shape)) if layer.ndim < ndim else layer


def fits(layer: torch.Tensor, shape: torch.Size) -> bool:
    return layer.ndim == len(shape) and all(s in (1, n) for s, n in zip(layer.shape, shape, strict=True))


def _merged(call: Call, inputs: list[torch.Tensor], shape: torch.Size) -> tuple[torch.Tensor, ...]:
    rec, ndim = call.rec, len(shape)
    known = [[align(layer, ndim) for layer in rec.ids(t).layers] for t in inputs]
    extents = [(1,) * (ndim - t.ndim) + tuple(t.shape) for t in inputs]
    merged: list[torch.Tensor] = []
    for axis in range(ndim):
        if shape[axis] == 1:
            continue
        present = [i for i, extent in enumerate(extents) if extent[axis] > 1]
        on_axis = {i: [layer for layer in known[i] if layer.shape[axis] > 1] for i in present}
        having = [i for i in present if on_axis[i]]
        if not having:
            continue
        if len(having) < len(present):
            for i in having:
                for layer in on_axis[i]:
                    rec.freeze(layer, "meets data that has no channel identity")
        for i in having[1:]:
            _pair(call, on_axis[having[0]], on_axis[i])
        for layer in on_axis[having[0]]:
            if not any(layer is other for other in merged):
                merged.append(layer)
    return tuple(merged)


def _pair(call: Call, left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    rec = call.rec
    if len(left) == len(right):
        pairs = list(zip(left, right, strict=True))
    else:  # no clear partner: tying all of them is always sound
        pairs = [(a, b) for a in left for b in right]
    for a, b in pairs:
        if a is not b:
            rec.unite(a, b)


@cache
def is_pointwise(func: Any, name: str, bare: str) -> bool:
    """Whether torch tags the operator, or the one that it is the in-place form of, as pointwise."""
    if torch.Tag.pointwise in func.tags:
        return True
    if name == bare or not hasattr(torch.ops.aten, bare):
        return False
    packet = getattr(torch.ops.aten, bare)
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
