"""Operators over space (pooling, resampling, padding): channels pass, identities along space do not."""

from __future__ import annotations

import torch

from tgfx.ops.movement import squeezed
from tgfx.ops.registry import Call, Recorder, register

POOLS = {
    "max_pool1d": 1, "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "avg_pool1d": 1, "avg_pool2d": 2,
    "avg_pool3d": 3, "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3, "adaptive_avg_pool1d": 1,
    "adaptive_max_pool1d": 1, "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "max_pool2d": 2, "max_pool3d": 3,
    "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "max_pool1d_with_indices": 1, "lp_pool2d": 2,
    "fractional_max_pool2d": 2, "max_unpool2d": 2, "mkldnn_max_pool2d": 2,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2, "upsample_linear1d": 1, "upsample_trilinear3d": 3, "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2, "_upsample_nearest_exact3d": 3, "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
    "reflection_pad1d": 1, "reflection_pad2d": 2, "reflection_pad3d": 3, "replication_pad1d": 1,
    "replication_pad2d": 2, "replication_pad3d": 3, "grid_sampler_2d": 2, "grid_sampler_3d": 3,
}  # fmt: skip


@register(*POOLS)
def pool(call: Call) -> None:
    rec, x = call.rec, call.args[0]
    first = x.ndim - POOLS[call.name]
    kept = []
    for layer in rec.ids(x).layers:
        over_space = [d for d in range(first, x.ndim) if layer.shape[d] > 1]
        others = [d for d in range(first) if layer.shape[d] > 1]
        if over_space and not others:
            rec.freeze(layer, f"varies along the space of {call.name}")
            continue
        if over_space:
            layer = rec.line(layer, max(others, key=lambda d: rec.distinct(layer, d)))
        kept.append(layer)
    for other in call.tensors()[1:]:
        rec.freeze_all(other, f"steers {call.name}")
    for out in call.outputs():
        rec.give(out, kept)


@register("constant_pad_nd")
def constant_pad(call: Call) -> None:
    """Padding moves what is there; the new places along a cut axis get ids of their own."""
    rec, x, pad = call.rec, call.args[0], call.args[1]
    value = call.arg(2, "value", 0)
    widths = {x.ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    layers = []
    for layer in rec.ids(x).layers:
        for axis, (before, after) in widths.items():
            if layer.shape[axis] == 1 or (before == 0 and after == 0):
                continue
            if min(before, after) < 0 or sum(n > 1 for n in layer.shape) > 1:
                rec.freeze(layer, "is cropped or padded across several axes")
            layer = _padded(rec, layer, axis, before, after)
        layers.append(layer)
    rec.give(call.out, layers, like=x if not value else None)
    if any(max(map(abs, widths[a])) > 0 for a in widths if rec.ids(x).covers(a)):
        rec.sized([x, call.out])


def _padded(rec: Recorder, layer: torch.Tensor, axis: int, before: int, after: int) -> torch.Tensor:
    pieces = []
    for width in (before, after):
        shape = list(layer.shape)
        shape[axis] = max(width, 0)
        line = [1] * layer.ndim
        line[axis] = -1
        fresh = rec.fresh(shape[axis], "expand", axis) if width > 0 else torch.zeros(0, dtype=torch.int64)
        pieces.append(fresh.reshape(line).expand(shape))
    body = layer.narrow(axis, -min(before, 0), layer.shape[axis] + min(before, 0) + min(after, 0))
    return squeezed(torch.cat([pieces[0], body, pieces[1]], axis))


@register("im2col")
def unfold(call: Call) -> None:
    """[b, c, h, w] -> [b, c * kernel, positions]: each channel becomes a run of kernel entries."""
    rec, x = call.rec, call.args[0]
    repeat = call.out.shape[-2] // x.shape[-3]
    kept = []
    for layer in rec.ids(x).layers:
        if layer.shape[-1] > 1 or layer.shape[-2] > 1:
            rec.freeze(layer, "varies along the space that is unfolded")
        elif layer.shape[-3] > 1:
            ids = layer.reshape(-1).repeat_interleave(repeat)
            kept.append(ids.reshape((1,) * (call.out.ndim - 2) + (-1, 1)))
    rec.give(call.out, kept)
