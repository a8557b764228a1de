"""Reductions and scans: what happens to channels depends on whether their own axis is reduced.

Sums and Euclidean norms read zeros as nothing; means and variances need the number of living channels and have
a masked form; anything else over channels (max, softmax, cumsum, sort) keeps them.
"""

from __future__ import annotations

import torch

from tgfx.ops.registry import Call, register

SUMS = ("sum", "nansum", "linalg_vector_norm", "norm", "count_nonzero", "any")
MEANS = ("mean", "var", "std", "var_mean", "std_mean")
OTHERS = (
    "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "all", "aminmax", "median", "mode",
    "nanmedian", "kthvalue", "nanmean",
)  # fmt: skip
ALONG = (
    "_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin",
    "sort", "topk", "argsort", "logcumsumexp", "glu",
)  # fmt: skip


def _dims(call: Call, x: torch.Tensor) -> list[int]:
    index = 2 if call.name in ("linalg_vector_norm", "norm") else 1
    dims = call.arg(index, "dim")
    if call.name in OTHERS and len(call.args) > 1 and isinstance(call.args[1], torch.Tensor):
        return []
    if dims is None or dims == [] or isinstance(dims, bool):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]


@register(*SUMS, *MEANS, *OTHERS)
def reduce(call: Call) -> None:
    rec, x = call.rec, call.args[0]
    if x.ndim == 0:
        return
    if len(call.tensors()) > 1:  # maximum(a, b) spelled max
        for tensor in call.tensors():
            rec.freeze_all(tensor, f"goes through {call.name}", limit=True)
        return
    dims = _dims(call, x)
    order = call.arg(1, "ord", 2) if call.name in ("linalg_vector_norm", "norm") else None
    kept = []
    for layer in rec.ids(x).layers:
        reduced = [d for d in dims if layer.shape[d] > 1]
        if not reduced:
            kept.append(layer)
            continue
        crossing = [d for d in range(layer.ndim) if layer.shape[d] > 1 and d not in dims]
        if crossing:  # varies on reduced and on kept axes: united along the reduced ones
            kept.append(rec.line(layer, max(crossing, key=lambda d: rec.distinct(layer, d))))
        elif call.name in MEANS:
            rec.read("masked", layer, [(x, layer)])
        elif call.name in SUMS and order in (None, 1, 2, 1.0, 2.0):
            rec.read("zero", layer, [(x, layer)])
        else:
            rec.freeze(layer, f"is reduced by {call.name}", limit=True)
    for out in call.outputs():
        if out.ndim == x.ndim:
            rec.give(out, kept)
        elif out.ndim:
            rec.give(out, [_drop(layer, dims) for layer in kept])


def _drop(layer: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return layer.reshape([n for axis, n in enumerate(layer.shape) if axis not in dims])


@register(*ALONG)
def along(call: Call) -> None:
    """Runs along one axis, element by element on all others."""
    rec, x = call.rec, call.args[0]
    if call.name == "glu":
        _glu(call)
        return
    index = 2 if call.name == "topk" else 1
    dim = call.arg(index, "dim", -1)
    dim = -1 if not isinstance(dim, int) or isinstance(dim, bool) else dim
    kept = []
    for layer in rec.ids(x).layers:
        if x.ndim and layer.shape[dim] > 1:
            crossing = [d for d in range(layer.ndim) if layer.shape[d] > 1 and d != dim % x.ndim]
            if not crossing:
                rec.freeze(layer, f"goes through {call.name.strip('_')} along its channels", limit=True)
                continue
            layer = rec.line(layer, max(crossing, key=lambda d: rec.distinct(layer, d)))
        kept.append(layer)
    for out in call.outputs():
        rec.give(out, kept if out.ndim == x.ndim else [])


def _glu(call: Call) -> None:
    """a * sigmoid(b) with a and b the halves of one axis: the halves are tied."""
    rec, x = call.rec, call.args[0]
    dim = call.arg(1, "dim", -1) % x.ndim
    half = x.shape[dim] // 2
    layers = []
    for layer in rec.ids(x).layers:
        if layer.shape[dim] > 1:
            first, second = layer.narrow(dim, 0, half), layer.narrow(dim, half, half)
            rec.unite(first, second)
            if first.numel() == 1:  # such a tensor would be gone as a whole
                rec.freeze(first, "is used on its own")
            layer = first
        layers.append(layer)
    rec.give(call.out, [layer for layer in layers if layer.numel() > 1])


@register("renorm")
def renorm(call: Call) -> None:
    """Every slice along `dim` is scaled by its own norm, over all other axes."""
    rec, x = call.rec, call.args[0]
    dim = call.arg(2, "dim") % x.ndim
    for layer in rec.ids(x).layers:
        if any(layer.shape[axis] > 1 for axis in range(x.ndim) if axis != dim):
            rec.freeze(layer, "is part of slices whose norm is limited (renorm)", limit=True)
    rec.give(call.out, rec.ids(x).layers)
