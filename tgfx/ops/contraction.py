"""Mixing operators: a contracted axis is summed away, so its channels must agree on both sides.

    out[m, n] = sum_k a[m, k] b[k, n]      ids(a, k) ~ ids(b, k);  out takes a's m and b's n

The sum is a *read*: a dead k has to count for nothing there. Grouped convolutions add their own ties: either
whole groups go (within) or the same positions of every group (across), whichever leaves more atoms.
"""

from __future__ import annotations

import math

import torch

from tgfx.ir.layer_shape import Grouping, LayerShape
from tgfx.ops.registry import Call, Recorder, register


@register("convolution")
def convolution(call: Call) -> None:
    rec = call.rec
    x, weight, bias, _, _, _, transposed, _, groups = call.args
    in_axis, out_axis = (0, 1) if transposed else (1, 0)
    for layer in rec.ids(weight).layers:
        if any(size > 1 for size in layer.shape[2:]):
            rec.freeze(layer, "window of a convolution kernel")
    for layer in rec.ids(x).layers:
        if any(size > 1 for size in layer.shape[2:]) and layer.shape[1] == 1:
            rec.freeze(layer, "varies along the space a convolution slides over")
    x_in, w_in, w_out = rec.vector(x, 1), rec.vector(weight, in_axis), rec.vector(weight, out_axis)
    if groups == 1:
        if x.shape[1] > 1:
            rec.unite(w_in, x_in)
            rec.read("zero", w_in, [(weight, w_in), (x, x_in)])
        out_ids = w_out
    else:
        out_ids = _grouped(call, x_in, w_in, w_out, groups, transposed)
    if bias is not None and out_ids.numel() > 1:
        rec.unite(rec.vector(bias, 0), out_ids)
    shape = [1] * call.out.ndim
    shape[1] = -1
    layers = [out_ids.reshape(shape)] if out_ids.numel() > 1 else []
    batch_layers = [x for x in rec.ids(x).layers if x.shape[0] > 1 and x.numel() == x.shape[0]]
    rec.give(call.out, layers + batch_layers)
    space = (x if transposed else call.out).shape[2:]
    factor, samples = 2 * math.prod(space), (x, 0)  # which may hold channels
    taps = rec.taps(weight)
    if taps is None:
        rec.work(factor * math.prod(weight.shape[2:]), [samples, (weight, 0), (weight, 1)], counted=True)
    else:
        rec.read("zero", taps, [(weight, taps)])
        rec.work(factor, [samples, (weight, 0), with_channels(taps, w_in)], counted=True)
    rec.out_channels(weight, out_ids)
    ins = w_in if groups == 1 else x_in
    rec.layer(_conv_shape(call), ins, out_ids, rows=samples)


def with_channels(taps: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Taps as one axis of a product, [layers, length]: one counts if it lives and its channel does."""
    of_channels = channels.reshape(1, -1, *[1] * (taps.ndim - 2)).expand(taps.shape)
    return torch.stack([of_channels.reshape(-1), taps.reshape(-1)])


def _conv_shape(call: Call) -> LayerShape:
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = call.args
    return LayerShape(
        "conv_transpose" if transposed else "conv",
        x.shape[1],
        call.out.shape[1],
        batch=x.shape[0],
        space=tuple(x.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        output_padding=tuple(output_padding) if transposed else (),
        groups=groups,
        grouping="" if groups == 1 else _grouping(x.shape[1] // groups, call.out.shape[1] // groups, groups),
        dtype=str(x.dtype).removeprefix("torch."),
    )


def _grouping(per_in: int, per_out: int, groups: int) -> Grouping:
    return "within" if per_in == 1 or groups >= per_in + per_out else "across"


def _grouped(
    call: Call, x_in: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, groups: int, transposed: bool
) -> torch.Tensor:
    rec = call.rec
    x, weight = call.args[0], call.args[1]
    per_in, per_out = x.shape[1] // groups, call.out.shape[1] // groups
    grouping = _grouping(per_in, per_out, groups)
    within = grouping == "within"
    rec.grouping(grouping)
    grid_in = x_in.reshape(groups, per_in)
    if transposed:
        # weight is [c_in, c_out / groups]: its rows are the input channels, its columns are shared by all groups
        rec.unite(w_in, x_in)
        if within:
            _freeze_shared(rec, w_out)
            rec.unite(grid_in, grid_in[:, :1])
            return grid_in[:, :1].expand(groups, per_out).reshape(-1)
        rec.unite(grid_in, grid_in[:1])
        rec.read("zero", w_in, [(weight, w_in), (x, x_in)])
        return w_out.reshape(1, -1).expand(groups, per_out).reshape(-1)
    grid_out = w_out.reshape(groups, per_out)
    if within:
        _freeze_shared(rec, w_in)
        rec.unite(grid_in, grid_in[:, :1])
        rec.unite(grid_out, grid_in[:, :1])
        return w_out
    rec.unite(grid_in, w_in.reshape(1, -1))
    rec.unite(grid_out, grid_out[:1])
    rec.read("zero", w_in, [(weight, w_in), (x, x_in)])
    return w_out


def _freeze_shared(rec: Recorder, ids: torch.Tensor) -> None:
    if ids.numel() > 1:
        rec.freeze(ids, "width of a group, the same for every group that stays")


@register("mm", "addmm")
def mm(call: Call) -> None:
    rec = call.rec
    bias, (a, b) = (call.args[0], call.args[1:3]) if call.name == "addmm" else (None, call.args[:2])
    k = _contract(call, a, 1, b, 0)
    m_layers = [layer for layer in rec.ids(a).layers if layer.shape[0] > 1 and layer.shape[1] == 1]
    n_layers = [layer for layer in rec.ids(b).layers if layer.shape[1] > 1 and layer.shape[0] == 1]
    _add_bias(call, bias, n_layers, m_layers)
    rec.give(call.out, m_layers + n_layers)
    rec.work(2, [(a, 0), k, (b, 1)], counted=True)
    outs = rec.vector(b, 1)
    rec.out_channels(b, outs)
    rows, dtype = a.shape[0], str(a.dtype).removeprefix("torch.")
    shape = LayerShape("linear", b.shape[0], b.shape[1], batch=rows, dtype=dtype)
    rec.layer(shape, rec.vector(b, 0), outs, rows=(a, 0))


@register("bmm", "baddbmm")
def bmm(call: Call) -> None:
    rec = call.rec
    bias, (a, b) = (call.args[0], call.args[1:3]) if call.name == "baddbmm" else (None, call.args[:2])
    for tensor in (a, b):
        settle_batch(call, tensor, (0,))
    k = _contract(call, a, 2, b, 1)
    batch = unite_batch(call, a, b, (0,))
    m_layers = [x for x in rec.ids(a).layers if x.shape[1] > 1 and x.numel() == x.shape[1]]
    n_layers = [x for x in rec.ids(b).layers if x.shape[2] > 1 and x.numel() == x.shape[2]]
    if batch and rec.head_first:
        rec.heads([*rec.ids(a).on_axis(0), *rec.ids(b).on_axis(0)])
        n_layers = keep_interior(call, n_layers)
    _add_bias(call, bias, n_layers, m_layers + batch)
    rec.give(call.out, batch + m_layers + n_layers)
    rec.work(2, [(a, 0), (a, 1), k, (b, 2)], counted=False)


@register("mv", "addmv")
def mv(call: Call) -> None:
    rec = call.rec
    bias, (a, b) = (call.args[0], call.args[1:3]) if call.name == "addmv" else (None, call.args[:2])
    _contract(call, a, 1, b, 0)
    m_layers = [x for x in rec.ids(a).layers if x.shape[0] > 1 and x.shape[1] == 1]
    out = [x.reshape(-1) for x in m_layers]
    if bias is not None:
        for layer in out:
            rec.unite(layer, rec.vector(bias, 0))
    rec.give(call.out, out)


@register("dot", "vdot")
def dot(call: Call) -> None:
    _contract(call, call.args[0], 0, call.args[1], 0)


def _contract(call: Call, a: torch.Tensor, ka: int, b: torch.Tensor, kb: int) -> tuple[torch.Tensor, int]:
    rec = call.rec
    left, right = rec.vector(a, ka), rec.vector(b, kb)
    if left.numel() > 1:
        rec.unite(left, right)
        rec.read("zero", right, [(b, right), (a, left)])
    return b, kb


def settle_batch(call: Call, tensor: torch.Tensor, batch_axes: tuple[int, ...]) -> None:
    """Bring layers that cross batch and feature axes onto one of them.

    Onto the batch axis (whole heads live or die) when heads are wanted, else where more atoms are left.
    """
    rec = call.rec
    if rec.head_first:
        _keep_repeats(call, tensor, batch_axes)
    settled = []
    for layer in rec.ids(tensor).layers:
        axes = [axis for axis in range(layer.ndim) if layer.shape[axis] > 1]
        if len(axes) > 1:
            heads = [axis for axis in axes if axis in batch_axes]
            whole_heads = bool(heads) and rec.head_first
            keep = max(heads if whole_heads else axes, key=lambda axis: (rec.distinct(layer, axis), axis))
            if whole_heads:
                rec.one_head(layer, keep)
            layer = rec.line(layer, keep)
        settled.append(layer)
    rec.give(tensor, settled, like=tensor)


def _keep_repeats(call: Call, tensor: torch.Tensor, batch_axes: tuple[int, ...]) -> None:
    """A key head that is repeated for several query heads goes with all of them: the repeat itself stays whole."""
    rec = call.rec
    for axis in batch_axes:
        on_axis = rec.ids(tensor).on_axis(axis)
        repeats = [layer for layer in on_axis if rec.is_broadcast(layer)]
        if len(repeats) < len(on_axis):
            for layer in repeats:
                rec.freeze(layer, "repeats a head for others, which go with it")


def keep_interior(call: Call, layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Where whole heads are gated nothing inside of them is."""
    for layer in layers:
        call.rec.freeze(layer, "lies inside attention heads, which are gated as a whole")
    return []


def unite_batch(call: Call, a: torch.Tensor, b: torch.Tensor, batch_axes: tuple[int, ...]) -> list[torch.Tensor]:
    """Batch entries meet their partner: same ids on both sides."""
    rec = call.rec
    kept: list[torch.Tensor] = []
    for axis in batch_axes:
        if a.shape[axis] == 1:
            continue
        left, right = rec.ids(a).on_axis(axis), rec.ids(b).on_axis(axis)
        for one, other in ((left, right), (right, left)):
            if one and not other and b.shape[axis] == a.shape[axis]:
                for layer in one:
                    rec.freeze(layer, "meets a batch entry that has no channel identity")
        for layer_a in left:
            for layer_b in right:
                rec.unite(layer_a.reshape(-1), layer_b.reshape(-1))
        kept.extend(left or right)
    return kept


def _add_bias(call: Call, bias: torch.Tensor | None, n_layers: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    if bias is None:
        return
    rec = call.rec
    if bias.ndim == 1:
        ids = rec.vector(bias, 0)
        for layer in n_layers:
            rec.unite(layer.reshape(-1), ids)
        if not n_layers and ids.numel() > 1:
            rec.freeze(ids, "meets data that has no channel identity")
        return
    add_matrix(call, bias, n_layers + others, call.out.ndim, "is added inside a matrix product")


def add_matrix(call: Call, added: torch.Tensor, layers: list[torch.Tensor], ndim: int, what: str) -> None:
    """Something added to a product (a mask, a table of positions) shares the channels of the axes it has."""
    rec = call.rec
    shared: list[torch.Tensor] = []
    for layer in rec.ids(added).layers:
        aligned = layer.reshape((1,) * (ndim - layer.ndim) + tuple(layer.shape))
        axes = [axis for axis in range(ndim) if aligned.shape[axis] > 1]
        partners = [x for x in layers if [a for a in range(ndim) if x.shape[a] > 1] == axes]
        for other in partners:
            rec.unite(aligned, other)
            shared.append(other)
        if not partners:
            rec.freeze(layer, what)
    for other in layers:
        axis = max(range(ndim), key=lambda a: other.shape[a])
        offset = axis - (ndim - added.ndim)
        if offset >= 0 and added.shape[offset] > 1 and not any(other is x for x in shared):
            rec.freeze(other, f"meets a matrix that {what}")
