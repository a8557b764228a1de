"""Rewriting the constants of a node for its smaller operands.

Meaning is kept by two rules:
- a *size that is read* from a cut axis stays the original size (`C // heads`, `C ** -0.5` mean what they meant), at
  any batch where samples and channels share the axis;
- a *size that is given* to an operator is scaled by survivors / before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from tgfx.ops.cutting import Cut, Rule, is_single_tensor, size_after
from tgfx.ops.naming import op_name
from tgfx.ops.reshaping import as_other, one_by_one, reshape, scaled, unflatten_module
from tgfx.ops.sizes_read import read_numel, read_size

# Spelled without sizes: the same call is right for smaller operands.
AGNOSTIC = {
    "flatten", "ravel", "linear", "matmul", "bmm", "mm", "baddbmm", "addmm", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "instance_norm", "batch_norm",
    "normalize", "softmax", "log_softmax", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "movedim", "cat", "stack", "hstack", "vstack", "dstack", "tile", "repeat",
    "flip", "interpolate", "upsample", "pixel_shuffle", "pixel_unshuffle", "unfold", "prelu",
    "glu", "dropout", "embedding", "tensordot", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d", "unbind",
    "atleast_2d", "mT", "T", "H", "select", "where", "index", "alpha_dropout", "feature_dropout",
    "dropout1d", "dropout2d", "dropout3d", "numpy_T", "diagonal", "tril", "triu", "index_select",
    "local_response_norm", "pairwise_distance", "outer", "ger", "kron", "bilinear", "cosine_similarity", "matrix_exp",
    "mv", "inner", "addcmul", "real", "imag",
}  # fmt: skip
_RESHAPE = {"view", "reshape", "expand", "unflatten"}
_SPLIT = {
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unsafe_split",
    "unsafe_chunk",
    "unsafe_split_with_sizes",
}
_MODULES_WITH_SIZES = {"Fold"}


def can_resize(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node that works with sizes can be brought to smaller operands."""
    name = op_name(node, root)
    if node.op == "call_module":
        named = isinstance(getattr(root.get_submodule(str(node.target)), "dim", None), str)  # an axis with a name
        return name not in _MODULES_WITH_SIZES and not named
    return name in AGNOSTIC or name in RULES


def resize(cut: Cut, node: fx.Node, copy: fx.Node, root: nn.Module) -> Any:
    """Bring `copy` (of `node`) to the cut. Returns what takes its place: a node, or a plain value."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if isinstance(module, nn.ChannelShuffle):
            return _shuffle_module(cut, node, copy, module)
        return unflatten_module(cut, node, copy, module) if isinstance(module, nn.Unflatten) else copy
    rule = RULES.get(op_name(node)) if node.op in ("call_function", "call_method") else None
    return rule(cut, node, copy) if rule else copy


def _split(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    args, kwargs = cut.seen(node)
    x = node.args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(cut.before(x))  # type: ignore[arg-type]
    if cut.kept(x, dim) is None:  # type: ignore[arg-type]
        return copy
    parts = 0
    sizes = []
    while True:
        try:
            sizes.append(size_after(cut, node, dim, parts))
        except IndexError:
            break
        parts += 1
    with cut.graph.inserting_before(copy):
        return cut.graph.call_function(torch.split, (copy.args[0], sizes, dim))


def _getitem(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    x = node.args[0]
    if not is_single_tensor(cut, x):
        return copy
    (_, index), _ = cut.seen(node)
    items = list(index) if isinstance(index, tuple) else [index]
    given = copy.args[1]
    new_items = list(given) if isinstance(given, tuple) else [given]
    ndim = len(cut.before(x))
    used = sum(_width(item) for item in items)
    axis, out_axis, later = 0, 0, []
    for i, item in enumerate(items):
        if item is Ellipsis:
            skip = ndim - used
            axis, out_axis = axis + skip, out_axis + skip
        elif item is None:
            out_axis += 1
        elif isinstance(item, slice):
            kept = cut.kept(x, axis)
            if kept is not None:
                start, stop, step = item.indices(cut.before(x)[axis])
                if step == 1:
                    low = sum(k < start for k in kept)
                    new_items[i] = slice(low, low + sum(start <= k < stop for k in kept))
                else:
                    places = [kept.index(k) for k in range(start, stop, step) if k in set(kept)]
                    new_items[i] = slice(None)
                    later.append((out_axis, places))
            axis, out_axis = axis + 1, out_axis + 1
        else:
            axis += _width(item)
            out_axis += 0 if isinstance(item, int) else getattr(item, "ndim", 1)
    copy.args = (copy.args[0], tuple(new_items) if isinstance(given, tuple) else new_items[0])
    return _pick(cut, copy, later)


def _width(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


def _pick(cut: Cut, copy: fx.Node, later: list[tuple[int, list[int]]]) -> fx.Node:
    """Picks along whole axes, after the node itself."""
    result = copy
    for axis, places in later:
        with cut.graph.inserting_after(result):
            index = cut.constant(places)
        with cut.graph.inserting_after(index):
            picked = cut.graph.call_function(torch.index_select, (result, axis, index))
        result = picked
    return result


def _repeat_interleave(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """Copies may be cut one by one, e.g. of the only key head that all query heads share."""
    x, (args, kwargs) = node.args[0], cut.seen(node)
    times = args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or dim is None:
        return copy
    axis = dim % len(cut.before(x))  # type: ignore[arg-type]
    wanted = cut.kept(node, axis)
    if wanted is None:
        return copy
    before = cut.kept(x, axis)  # type: ignore[arg-type]
    sources = range(cut.before(x)[axis]) if before is None else before  # type: ignore[arg-type]
    given = [source * times + copied for source in sources for copied in range(times)]
    return copy if given == wanted else _pick(cut, copy, [(axis, [given.index(place) for place in wanted])])


def _slice(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """aten.slice(x, dim, start, end, step) and narrow(x, dim, start, length)."""
    x = node.args[0]
    args, kwargs = cut.seen(node)
    narrow = op_name(node) == "narrow"
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(cut.before(x))  # type: ignore[arg-type]
    kept = cut.kept(x, dim)  # type: ignore[arg-type]
    if kept is None:
        return copy
    size = cut.before(x)[dim]  # type: ignore[arg-type]
    start = args[2] if len(args) > 2 else kwargs.get("start")
    if narrow:
        length = args[3] if len(args) > 3 else kwargs["length"]
        first = start + size if start < 0 else start
        window = slice(first, first + length)
    else:
        stop = args[3] if len(args) > 3 else kwargs.get("end")
        window = slice(start, stop, (args[4] if len(args) > 4 else kwargs.get("step", 1)) or 1)
    wanted = set(range(*window.indices(size)))
    places = [i for i, k in enumerate(kept) if k in wanted]
    with cut.graph.inserting_before(copy):
        if places and places == list(range(places[0], places[-1] + 1)):
            return cut.graph.call_function(torch.narrow, (copy.args[0], dim, places[0], len(places)))
        index = cut.constant(places)
        return cut.graph.call_function(torch.index_select, (copy.args[0], dim, index))


def _pad(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    x = node.args[0]
    args, kwargs = cut.seen(node)
    pad = list(args[1] if len(args) > 1 else kwargs["pad"])
    new = one_by_one(cut, copy.args[1] if len(copy.args) > 1 else copy.kwargs["pad"], pad, copy)
    ndim, changed = len(cut.before(x)), False  # type: ignore[arg-type]
    for i in range(0, len(pad), 2):
        axis = ndim - 1 - i // 2
        kept = cut.kept(node, axis)
        if kept is None:
            continue
        changed = True
        end = pad[i] + cut.before(x)[axis]  # type: ignore[arg-type]
        first, last = (sum(k < pad[i] for k in kept), sum(k >= end for k in kept))
        new[i], new[i + 1] = (now if old > 0 else old for now, old in ((first, pad[i]), (last, pad[i + 1])))
    return _with_argument(copy, 1, "pad", new) if changed else copy


def _with_argument(copy: fx.Node, position: int, key: str, value: Any) -> fx.Node:
    """The node with another value for an argument, given by place or by name as before."""
    if len(copy.args) > position:
        copy.args = (*copy.args[:position], value, *copy.args[position + 1 :])
    else:
        copy.kwargs = {**copy.kwargs, key: value}
    return copy


def _normalized_shape(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    x = node.args[0] if node.args else node.kwargs["input"]
    before, (args, kwargs) = cut.before(x), cut.seen(node)  # type: ignore[arg-type]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    axes = range(len(before) - len(shape), len(before))
    if all(cut.kept(x, axis) is None for axis in axes):  # type: ignore[arg-type]
        return copy
    given = copy.args[1] if len(copy.args) > 1 else copy.kwargs["normalized_shape"]
    sizes = zip(one_by_one(cut, given, shape, copy), axes, strict=True)
    with cut.graph.inserting_before(copy):
        new = [scaled(cut, size, before[axis], size_after(cut, x, axis)) for size, axis in sizes]  # type: ignore[arg-type]
    return _with_argument(copy, 1, "normalized_shape", new)


def _group_count(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """group_norm(x, groups) and conv(x, w, b, stride, padding, dilation, groups).

    A number of groups that is computed (from the batch: one for each sample) still is.
    """
    position = {"group_norm": 1, "convolution": 8}.get(op_name(node), 6)
    if op_name(node).startswith("conv_transpose"):
        position = 6
    key = "num_groups" if op_name(node) == "group_norm" else "groups"
    args, kwargs = cut.seen(node)
    before = args[position] if len(args) > position else kwargs.get(key, 1)
    after = cut.groups(node, before)
    if before == after:
        return copy
    given = copy.args[position] if len(copy.args) > position else copy.kwargs[key]
    with cut.graph.inserting_before(copy):
        return _with_argument(copy, position, key, scaled(cut, given, before, after))


def _channel_shuffle(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """With a group for each channel nothing moves; other shuffles are seen as a whole (passes/shuffles.py)."""
    x = node.args[0]
    kept, (args, kwargs) = cut.kept(x, 1), cut.seen(node)  # type: ignore[arg-type]
    groups = args[1] if len(args) > 1 else kwargs["groups"]
    one_each = groups == cut.before(x)[1]  # type: ignore[arg-type]
    return copy if kept is None or not one_each else _with_argument(copy, 1, "groups", len(kept))


def _shuffle_module(cut: Cut, node: fx.Node, copy: fx.Node, module: nn.ChannelShuffle) -> Any:
    x = node.args[0]
    kept = cut.kept(x, 1)  # type: ignore[arg-type]
    if kept is None or module.groups != cut.before(x)[1]:  # type: ignore[arg-type]
        return copy
    with cut.graph.inserting_before(copy):
        return cut.graph.call_function(torch.channel_shuffle, (copy.args[0], len(kept)))


def _attention(cut: Cut, node: fx.Node, copy: fx.Node) -> Any:
    """The default scale is one over the root of the head size as it was: spell it out."""
    (_args, kwargs) = cut.seen(node)
    q = node.args[0] if node.args else node.kwargs["query"]
    if kwargs.get("scale") is None:
        copy.kwargs = {**copy.kwargs, "scale": cut.before(q)[-1] ** -0.5}  # type: ignore[arg-type]
    return copy


RULES: dict[str, Rule] = {
    **dict.fromkeys(_RESHAPE, reshape),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as"), as_other),
    **dict.fromkeys(_SPLIT, _split),
    "getitem": _getitem,
    "repeat_interleave": _repeat_interleave,
    "slice": _slice,
    "narrow": _slice,
    "pad": _pad,
    "constant_pad_nd": _pad,
    "layer_norm": _normalized_shape,
    "rms_norm": _normalized_shape,
    "group_norm": _group_count,
    **{f"conv{d}d": _group_count for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _group_count for d in (1, 2, 3)},
    "convolution": _group_count,
    "channel_shuffle": _channel_shuffle,
    "native_channel_shuffle": _channel_shuffle,
    "scaled_dot_product_attention": _attention,
    "size": read_size,
    "getattr": read_size,
    "numel": read_numel,
}
