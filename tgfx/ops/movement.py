"""Data movement: run the very same operator on the identities.

    out = op(x, *args)      ids(out) = op(ids(x), *args)

Exact by construction, whatever the operator does to indices (channel shuffle, PixelShuffle, window partition).
"""

from __future__ import annotations

import torch

from tgfx.ops.registry import Call, register

# view-like names run as reshape: a broadcast layer cannot always be viewed where the real tensor can
RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "unflatten", "flatten")
MOVES = (
    "permute", "transpose", "t", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes", "unbind",
    "flip", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "narrow", "movedim",
    "swapaxes", "repeat_interleave", "tile", "rot90", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "numpy_T", "mT", "permute_copy", "transpose_copy", "native_channel_shuffle",
    "slice_copy", "select_copy", "squeeze_copy", "unsqueeze_copy", "t_copy", "repeat",
)  # fmt: skip
# operators whose arguments are sizes: whoever calls one must be able to resize it
SIZED = {
    *RESHAPES, "select", "slice", "split", "split_with_sizes", "narrow", "repeat_interleave", "chunk", "tensor_split",
    "unsafe_split", "unsafe_split_with_sizes", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "native_channel_shuffle", "unfold", "diagonal", "unbind", "slice_copy", "select_copy", "unsafe_chunk", "view_copy",
}  # fmt: skip


@register(*RESHAPES, *MOVES)
def move(call: Call) -> None:
    rec, x = call.rec, call.args[0]
    if call.name in ("select", "select_copy", "unbind"):
        _no_cut_along(call, x)
    if call.name == "slice":
        _keep_views(call, x)
    ids = rec.ids(x)
    outs = call.outputs()
    moved: list[list[torch.Tensor]] = [[] for _ in outs]
    for layer in ids.layers:
        for into, part in zip(moved, _parts(call, x, layer, outs), strict=True):
            part = squeezed(part)
            if part.numel() > 1:
                into.append(part)
            elif part.numel():  # such a tensor would be gone as a whole; it may also be broadcast
                rec.freeze(part, "is used on its own")
    for out, layers in zip(outs, moved, strict=True):
        rec.give(out, layers, like=x)
    if call.name in SIZED:
        rec.sized([x, *outs])


def _no_cut_along(call: Call, x: torch.Tensor) -> None:
    """Entries picked one by one must all stay: the picked axis itself is never cut."""
    rec = call.rec
    dim = call.arg(1, "dim", 0) % x.ndim
    for layer in rec.ids(x).on_axis(dim):
        if layer.numel() == layer.shape[dim]:
            rec.freeze(layer, "is picked entry by entry")
        else:
            rec.unite(layer, layer.narrow(dim, 0, 1))


def _keep_views(call: Call, x: torch.Tensor) -> None:
    """What is left of every other channel is no slice but a look-up, and that copies: a change would not be seen."""
    strided = [layer for layer in call.rec.ids(x).on_axis(call.arg(1, "dim", 0)) if call.arg(4, "step", 1) > 1]
    if strided and call.rec.is_written_later():
        for layer in strided:
            call.rec.freeze(layer, "is sliced in steps, and the slice is changed in place", limit=True)


def _parts(call: Call, x: torch.Tensor, layer: torch.Tensor, outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each result has of a layer; identities that an empty result does not show are carried all the same."""
    if x.numel() == 0:
        return _moved_empty(call, x, layer, outs)
    parts = _run(call, layer.expand(x.shape), outs[0].shape)
    return [part if out.numel() else _of_empty(call, x, layer, out) for part, out in zip(parts, outs, strict=True)]


def _of_empty(call: Call, x: torch.Tensor, layer: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A slice without entries, `y[..., 8:]` of 8 channels: the other axes still have theirs."""
    changed = [a for a in range(x.ndim) if x.shape[a] != out.shape[a]] if x.ndim == out.ndim else []
    if len(changed) != 1:
        call.rec.freeze(layer, f"goes into an empty result of {call.name}", limit=True)
    return layer if len(changed) == 1 and layer.shape[changed[0]] == 1 else layer.new_empty(0)


def _moved_empty(call: Call, x: torch.Tensor, layer: torch.Tensor, outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """An empty tensor (an expert's, that got no token) moves as it would with one entry where it has none."""
    try:
        parts = _run(call, layer.expand(with_entries(x.shape)), with_entries(outs[0].shape))
    except RuntimeError:
        parts = []
    if [part.shape for part in parts] == [with_entries(out.shape) for out in outs]:
        return parts
    call.rec.freeze(layer, f"is moved by {call.name} while it is empty", limit=True)
    return [layer.new_empty(0) for _ in outs]


def with_entries(shape: torch.Size) -> torch.Size:
    """The shape with one entry along each empty axis."""
    return torch.Size(max(size, 1) for size in shape)


def _run(call: Call, layer: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """`shape`: of the (first) result."""
    if call.name in RESHAPES:
        return [layer.reshape(shape)]
    result = call.func(layer, *call.args[1:], **call.kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def squeezed(layer: torch.Tensor) -> torch.Tensor:
    """Shrink a layer to size 1 on every axis along which it is constant."""
    for axis in range(layer.ndim):
        if layer.shape[axis] < 2:
            continue
        head = layer.narrow(axis, 0, 1)
        if layer.stride(axis) == 0 or bool((layer == head).all()):
            layer = head
    return layer


@register("expand", "expand_copy", "broadcast_to")
def expand(call: Call) -> None:
    """A broadcast axis gets ids of its own: it must follow the channels it will meet."""
    rec, x, out = call.rec, call.args[0], call.out
    shift = out.ndim - x.ndim
    layers = [layer.reshape((1,) * shift + tuple(layer.shape)) for layer in rec.ids(x).layers]
    grown = False
    for axis in range(out.ndim):
        before = x.shape[axis - shift] if axis >= shift else 1
        if before == 1 and out.shape[axis] > 1:
            grown = True
            layers.append(_on_axis(rec.fresh(out.shape[axis], "expand", axis), axis, out.ndim))
    rec.give(out, layers, like=x)
    if grown or layers:
        rec.sized([x, out])


def _on_axis(ids: torch.Tensor, axis: int, ndim: int) -> torch.Tensor:
    shape = [1] * ndim
    shape[axis] = -1
    return ids.reshape(shape)


@register("view_as_real", "view_as_real_copy")
def as_real(call: Call) -> None:
    """A complex entry becomes two on an axis of their own, which are one channel."""
    rec, x = call.rec, call.args[0]
    rec.give(call.out, [layer.unsqueeze(-1) for layer in rec.ids(x).layers])


@register("view_as_complex", "view_as_complex_copy")
def as_complex(call: Call) -> None:
    """Pairs on the last axis become one entry: they go together."""
    rec, x = call.rec, call.args[0]
    layers = []
    for layer in rec.ids(x).layers:
        first = layer.narrow(-1, 0, 1)
        if layer.shape[-1] > 1:
            rec.unite(layer, first)
            if first.numel() == 1:  # the axis of pairs itself
                rec.freeze(layer, "is a part of complex numbers")
        layers.append(first.squeeze(-1))
    rec.give(call.out, [layer for layer in layers if layer.numel() > 1])


@register("roll")
def roll(call: Call) -> None:
    """Rolling along a cut axis would need another shift for every cut: kept."""
    rec, x = call.rec, call.args[0]
    dims = call.arg(2, "dims", []) or list(range(x.ndim))
    dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
    for layer in rec.ids(x).layers:
        if any(layer.shape[d] > 1 for d in dims):
            rec.freeze(layer, "is rolled along its channels", limit=True)
    rec.give(call.out, rec.ids(x).layers, like=x)


@register("as_strided", "set", "resize", "unfold_copy", "as_strided_copy")
def by_memory(call: Call) -> None:
    """Addressed by memory offsets: nothing can be said about who is where, unless nothing moved."""
    x, out = call.args[0], call.out
    if isinstance(out, torch.Tensor) and out.shape == x.shape and _are_where_they_were(x, out):
        call.rec.give(out, call.rec.ids(x).layers, like=x)
        call.rec.sized([x, out])
        return
    for tensor in call.tensors():
        call.rec.freeze_all(tensor, "is addressed by memory strides", limit=True)


def _are_where_they_were(x: torch.Tensor, out: torch.Tensor) -> bool:
    """By their places: values may be those of memory that was never written, in a run in which nothing is computed."""
    if out is x:  # changed in place, as pooling does: what it was before is gone, so only the plain order is trusted
        places = torch.empty(out.shape, device="meta").stride()
    elif out.data_ptr() == x.data_ptr():
        places = x.stride()
    else:
        return False
    return all(size < 2 or now == before for size, now, before in zip(out.shape, out.stride(), places, strict=True))
