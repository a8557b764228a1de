"""cat and stack: along the joined axis identities are laid end to end, on all others they are united."""

from __future__ import annotations

import torch

from tgfx.ops.movement import squeezed
from tgfx.ops.registry import Call, register


@register("cat", "concat", "concatenate")
def cat(call: Call) -> None:
    parts = [t for t in call.args[0] if not (t.ndim == 1 and t.numel() == 0)]
    dim = call.arg(1, "dim", 0) % call.out.ndim
    _join(call, [(t, list(call.rec.ids(t).layers)) for t in parts], dim)


@register("stack")
def stack(call: Call) -> None:
    dim = call.arg(1, "dim", 0) % call.out.ndim
    parts = [(t.unsqueeze(dim), [layer.unsqueeze(dim) for layer in call.rec.ids(t).layers]) for t in call.args[0]]
    _join(call, parts, dim)


def _join(call: Call, parts: list[tuple[torch.Tensor, list[torch.Tensor]]], dim: int) -> None:
    rec, out = call.rec, call.out
    layers: list[torch.Tensor] = []
    # layers that do not vary along the joined axis must agree between the parts
    for axis in range(out.ndim):
        if axis == dim or out.shape[axis] == 1:
            continue
        lined = [[x for x in known if x.shape[axis] > 1 and x.shape[dim] == 1] for _, known in parts]
        having = [own for own in lined if own]
        if not having:
            continue
        joint = [[x for x in known if x.shape[axis] > 1 and x.shape[dim] > 1] for _, known in parts]
        if len(having) < len(parts):
            for own, crossing in zip(lined, joint, strict=True):
                for layer in own:
                    rec.freeze(layer, "is joined with data that has no channel identity")
                if not own:
                    for layer in crossing:
                        rec.freeze(layer, "is joined across another axis")
        first = having[0]
        for own in having[1:]:
            for a, b in zip(first, own, strict=False):
                rec.unite(a, b)
            for b in own[len(first) :]:
                rec.unite(first[0], b)
            for a in first[len(own) :]:
                rec.unite(a, own[0])
        layers.extend(layer for layer in first if not any(layer is seen for seen in layers))
    along = _end_to_end(call, parts, dim)
    if along is not None:
        layers.append(along)
    rec.give(out, layers)


def _end_to_end(call: Call, parts: list[tuple[torch.Tensor, list[torch.Tensor]]], dim: int) -> torch.Tensor | None:
    rec = call.rec
    pieces, any_layer = [], False
    for tensor, known in parts:
        own = [layer for layer in known if layer.shape[dim] > 1]
        for extra in own[1:]:
            rec.unite(own[0], extra)
        if own:
            any_layer = True
            pieces.append(own[0].expand(tuple(n if own[0].shape[a] > 1 else 1 for a, n in enumerate(tensor.shape))))
        else:  # id 0: data without identity, kept
            shape = [1] * tensor.ndim
            shape[dim] = tensor.shape[dim]
            pieces.append(torch.zeros(shape, dtype=torch.int64))
    if not any_layer:
        return None
    full = [max(p.shape[a] for p in pieces) for a in range(call.out.ndim)]
    grown = [p.expand([p.shape[a] if a == dim else full[a] for a in range(p.ndim)]) for p in pieces]
    return squeezed(torch.cat(grown, dim))
