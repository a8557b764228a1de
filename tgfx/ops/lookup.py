"""Look-ups: rows picked by numbers that only the run knows are kept; the other axes carry on."""

from __future__ import annotations

import torch

from tgfx.ops.movement import squeezed, with_entries
from tgfx.ops.registry import Call, Recorder, register


@register("embedding_renorm")
def embedding_renorm(call: Call) -> None:
    """nn.Embedding(max_norm=...): rows are scaled in place by their norm over all columns."""
    weight = call.args[0]
    _keep_rows(call.rec, weight, 0, "rows are looked up by the input")
    for layer in call.rec.ids(weight).on_axis(1):
        call.rec.freeze(layer, "is part of rows whose norm is limited (max_norm)", limit=True)
    call.rec.freeze_all(call.args[1], "is an index")


@register("embedding")
def embedding(call: Call) -> None:
    rec, (weight, index) = call.rec, call.args[:2]
    _keep_rows(rec, weight, 0, "rows are looked up by the input")
    columns = [layer for layer in rec.ids(weight).layers if layer.shape[1] > 1 and layer.shape[0] == 1]
    if index.numel() > 1:
        for layer in rec.ids(index).layers:
            rec.freeze(layer, "is an index")
    rec.give(call.out, [layer.reshape((1,) * index.ndim + (-1,)) for layer in columns])


@register("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> None:
    rec, weight = call.rec, call.args[0]
    _keep_rows(rec, weight, 0, "rows are looked up by the input")
    for other in call.tensors()[1:]:
        rec.freeze_all(other, "steers a look-up")
    columns = [layer for layer in rec.ids(weight).layers if layer.shape[1] > 1 and layer.shape[0] == 1]
    for i, out in enumerate(call.outputs()):
        rec.give(out, columns if i == 0 else [])


@register("index_select")
def index_select(call: Call) -> None:
    rec, (x, dim, index) = call.rec, call.args[:3]
    rec.freeze_all(index, "is an index")
    _keep_rows(rec, x, dim % x.ndim, "is picked by an index")
    kept = [layer for layer in rec.ids(x).layers if layer.shape[dim] == 1]
    rec.give(call.out, kept, like=x)


@register("index", "_unsafe_index")
def index(call: Call) -> None:
    """x[i, :, j]: indexed axes are kept, the others move as the operator moves them."""
    rec, (x, indices) = call.rec, call.args[:2]
    for tensor in indices:
        if tensor is not None:
            rec.freeze_all(tensor, "is an index")
    for axis, tensor in enumerate(indices):
        if tensor is not None:
            width = tensor.ndim if tensor.dtype in (torch.bool, torch.uint8) else 1
            for offset in range(width):
                if axis + offset < x.ndim:
                    _keep_rows(rec, x, axis + offset, "is picked by an index")
    kept = []
    picked = [a for a, tensor in enumerate(indices) if tensor is not None]
    for layer in rec.ids(x).layers:
        if all(layer.shape[a] == 1 for a in picked):
            kept.append(squeezed(call.func(layer.expand(with_entries(x.shape)), [_some(i) for i in indices])))
    rec.give(call.out, [layer for layer in kept if layer.numel() > 1], like=x)


def _some(index: torch.Tensor | None) -> torch.Tensor | None:
    """An index that picks something, of the same kind: what is not picked moves as well where nothing is."""
    if index is None or (index.numel() and (index.dtype not in (torch.bool, torch.uint8) or bool(index.any()))):
        return index
    some = index.new_zeros(with_entries(index.shape))
    if index.dtype in (torch.bool, torch.uint8):
        some.view(-1)[0] = 1
    return some


@register("gather", "take_along_dim")
def gather(call: Call) -> None:
    rec, (x, dim, index) = call.rec, call.args[:3]
    if x.ndim == 0:
        return
    _keep_rows(rec, x, dim % x.ndim, "is picked by an index")
    for layer in [*rec.ids(x).layers, *rec.ids(index).layers]:
        rec.freeze(layer, "is gathered element by element", limit=True)
    rec.give(call.out, [])


def _keep_rows(rec: Recorder, tensor: torch.Tensor, axis: int, reason: str) -> None:
    for layer in rec.ids(tensor).on_axis(axis):
        rec.freeze(layer, reason)
