"""Normalisation: BatchNorm works channel by channel; LayerNorm and GroupNorm read channels together.

So does a batch norm that standardises a weight: the other axes of the weight are channels too, and it has no running
statistics. All three have an exact masked form (statistics over living channels only), so they are reads that ask for
it. GroupNorm ties its groups like a grouped convolution: whole groups, or equal positions of all.
"""

from __future__ import annotations

import torch

from tgfx.ops.registry import Call, register

BATCH = (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "_batch_norm_with_update", "_batch_norm_no_update", "batch_norm_with_update", "_native_batch_norm_legit_functional",
    "miopen_batch_norm",
)  # fmt: skip


@register(*BATCH)
def batch_norm(call: Call) -> None:
    rec, x = call.rec, call.args[0]
    across = []
    for layer in rec.ids(x).layers:
        if layer.shape[1] > 1:
            continue
        if _without_memory(call) and sum(size > 1 for size in layer.shape) == 1:
            rec.read("masked", layer, [(x, layer)])
            across.append(layer)
        else:
            rec.freeze(layer, "is normalised over the batch and its positions")
    channel = rec.vector(x, 1)
    vectors = [t for t in call.tensors()[1:] if t.ndim == 1 and t.numel() == x.shape[1]]
    if x.shape[1] > 1:
        ids = [rec.vector(vector, 0) for vector in vectors]
        if ids:  # only the first is worth telling a reader about
            rec.unite(ids[0], channel)
        if len(ids) > 1:
            rec.unite(torch.stack(ids[1:]), channel, quiet=True)
    shape = [1] * x.ndim
    shape[1] = -1
    for i, out in enumerate(call.outputs()):
        if out.numel() == 0:
            rec.give(out, [])
        elif i == 0:
            rec.give(out, [*across, *([channel.reshape(shape)] if x.shape[1] > 1 else [])])
        else:
            rec.give(out, [channel] if out.ndim == 1 and out.numel() == x.shape[1] else [])


def _without_memory(call: Call) -> bool:
    """F.batch_norm(x, None, None, training=True): only what it sees counts, in train and eval mode."""
    if call.name not in ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"):
        return False
    flags = [arg for arg in call.args if isinstance(arg, bool)]
    running = [arg for arg in call.args[3:5] if isinstance(arg, torch.Tensor)]
    return flags[:1] == [True] and not running


@register("native_layer_norm")
def layer_norm(call: Call) -> None:
    rec, (x, shape, weight, bias) = call.rec, call.args[:4]
    first = x.ndim - len(shape)
    outer = [layer for layer in rec.ids(x).layers if all(n == 1 for n in layer.shape[first:])]
    inner = []
    for axis in range(first, x.ndim):
        if x.shape[axis] == 1:
            continue
        ids = rec.vector(x, axis)
        for param in (weight, bias):
            if param is not None:
                rec.unite(rec.vector(param, axis - first), ids)
        line = [1] * x.ndim
        line[axis] = -1
        inner.append(ids.reshape(line))
        rec.read("masked", ids, [(x, inner[-1])])
    rec.give(call.out[0], outer + inner)
    for extra in call.outputs()[1:]:
        rec.give(extra, [layer for layer in outer if layer.ndim == extra.ndim])


@register("native_group_norm")
def group_norm(call: Call) -> None:
    rec, (x, weight, bias) = call.rec, call.args[:3]
    channels, groups = call.args[4], call.args[6]
    for layer in rec.ids(x).layers:
        if layer.shape[1] == 1 and any(n > 1 for n in layer.shape[2:]):
            rec.freeze(layer, "is normalised over its positions")
    ids = rec.vector(x, 1)
    for param in (weight, bias):
        if param is not None and channels > 1:
            rec.unite(rec.vector(param, 0), ids)
    per_group = channels // groups
    line = ids.reshape([-1 if axis == 1 else 1 for axis in range(x.ndim)])
    if channels > 1 and per_group > 1:
        grid = ids.reshape(groups, per_group)
        if groups > per_group:
            rec.grouping("within")
            rec.unite(grid, grid[:, :1])
        else:
            rec.grouping("across")
            rec.unite(grid, grid[:1])
            rec.read("masked", ids, [(x, line)])
    elif channels > 1:
        rec.grouping("within")
    rec.give(call.out[0], [line] if channels > 1 else [])
    for extra in call.outputs()[1:]:
        rec.give(extra, [])
