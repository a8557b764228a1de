"""Fused attention: softmax(q k^T) v with heads as batch axes.

    q[b, h, n, d]  k[b, h, s, d]  v[b, h, s, e]  ->  out[b, h, n, e]

d is contracted (a read), e passes through, h ties q, k, v and the mask. With grouped queries a key head serves
several query heads, so its id is repeated. A causal mask is drawn by position: row n sees what is not behind it, and so
no row can go.
"""

from __future__ import annotations

import torch

from tgfx.ops.contraction import add_matrix, keep_interior, settle_batch
from tgfx.ops.registry import Call, register

FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_cudnn_attention",
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math_for_mps",
)  # fmt: skip


@register(*FUSED)
def fused_attention(call: Call) -> None:
    rec, (q, k, v) = call.rec, call.args[:3]
    mask = call.kwargs.get("attn_mask")
    if mask is None and len(call.args) > 3 and isinstance(call.args[3], torch.Tensor):
        mask = call.args[3]
    batch = tuple(range(q.ndim - 2))
    for tensor in (q, k, v):
        settle_batch(call, tensor, batch)
    for tensor in (k, v):  # the axis that softmax runs over
        for layer in rec.ids(tensor).on_axis(-2):
            rec.freeze(layer, "is a position that attention normalises over")
    if _is_causal(call):
        for layer in rec.ids(q).on_axis(-2):
            rec.freeze(layer, "is a position that a causal mask counts")
    q_d, k_d = rec.vector(q, -1), rec.vector(k, -1)
    if q_d.numel() > 1:
        rec.unite(q_d, k_d)
        rec.read("zero", q_d, [(q, q_d), (k, k_d)])
    heads = _heads(call, q, k, v, batch)
    n_axis, e_axis = q.ndim - 2, q.ndim - 1
    rows = [x for x in rec.ids(q).layers if x.shape[n_axis] > 1 and x.numel() == x.shape[n_axis]]
    if mask is not None:
        add_matrix(call, mask, heads + rows, q.ndim, "is a mask over positions")
    values = [x for x in rec.ids(v).layers if x.shape[e_axis] > 1 and x.numel() == x.shape[e_axis]]
    if heads and rec.head_first:
        rec.heads(heads)
        values = keep_interior(call, values)
    out = call.outputs()[0]
    rec.give(out, heads + rows + values)
    for extra in call.outputs()[1:]:
        rec.give(extra, [])
    positions = k.shape[-2]
    batch_axes = [(q, axis) for axis in batch]
    rec.work(2 * positions, [*batch_axes, (q, n_axis), (q, e_axis)], counted=False)
    rec.work(2 * positions, [*batch_axes, (q, n_axis), (v, e_axis)], counted=False)


def _is_causal(call: Call) -> bool:
    """Each kernel takes the flag at a place of its own."""
    names = [argument.name for argument in call.func._schema.arguments]
    return "is_causal" in names and bool(call.arg(names.index("is_causal"), "is_causal", False))


def _heads(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: tuple[int, ...]) -> list:
    rec = call.rec
    kept: list[torch.Tensor] = []
    for axis in batch:
        if q.shape[axis] == 1:
            continue
        own = rec.ids(q).on_axis(axis)
        for other in (k, v):
            repeat = q.shape[axis] // other.shape[axis]
            theirs = rec.ids(other).on_axis(axis)
            for layer in theirs:
                repeated = layer.reshape(-1).repeat_interleave(repeat)
                for mine in own:
                    rec.unite(mine.reshape(-1), repeated)
                if not own:
                    rec.freeze(layer, "meets a head that has no channel identity")
            if own and not theirs and other.shape[axis] > 1:
                for mine in own:
                    rec.freeze(mine, "meets a head that has no channel identity")
        kept.extend(own)
    return kept
