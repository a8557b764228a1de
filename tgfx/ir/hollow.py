"""Results without numbers: the right size, type and layout, and memory that nobody ever touches.

To see that two programs make the same calls on the same tensors, nothing has to be computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tgfx.ir.writes import is_plain

aten = torch.ops.aten
# below, computing is as fast
LEAST_PRODUCTS = 100_000
LEAST_NUMBERS = 4_096
_FLOATS = (torch.float32, torch.float64)


def product(func: Any, args: tuple) -> torch.Tensor | None:
    """A hollow result of a costly product: where numbers end and hollow tensors begin. None: has to be computed."""
    sizer = _SIZES.get(func)
    if sizer is None:
        return None
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    dtype = tensors[0].dtype
    if dtype not in _FLOATS or any(not is_plain(t) or t.dtype != dtype for t in tensors):
        return None
    found = sizer(*args)
    return torch.empty(found[0], dtype=dtype) if found is not None and found[1] >= LEAST_PRODUCTS else None


def passed_on(func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operator makes of hollow operands; None if it has to be run on whatever is in them."""
    tensors = _tensors(args)
    if not all(map(is_plain, tensors)) or max(t.numel() for t in tensors) < LEAST_NUMBERS:
        return None
    if func in _RULES:
        return _RULES[func](*args, **kwargs)
    if torch.Tag.pointwise not in func.tags:
        return None
    if func._schema.is_mutable:
        return args[0] if _writes_first(func) else None
    return _pointwise(func, args, kwargs, tensors)


def _pointwise(func: Any, args: tuple, kwargs: dict, tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """As large as its operands are together, and laid out as those that are as large."""
    shape = tensors[0].shape
    if any(t.shape != shape for t in tensors):
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    full = [t for t in tensors if t.shape == shape]
    if not full or not full[0].is_contiguous() or any(t.stride() != full[0].stride() for t in full):
        return None
    return torch.empty(shape, dtype=_dtype(func, args, kwargs))


_dtypes: dict[tuple, torch.dtype] = {}


def _dtype(func: Any, args: tuple, kwargs: dict) -> torch.dtype:
    """By trying it on single numbers."""
    seen = (*args, *kwargs.values())
    key = (func, *kwargs, *((v.dtype, v.ndim) if isinstance(v, torch.Tensor) else type(v) for v in seen))
    if key not in _dtypes:
        single = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.new_ones((1,) * t.ndim), (args, kwargs))
        _dtypes[key] = func(*single[0], **single[1]).dtype
    return _dtypes[key]


def _writes_first(func: Any) -> bool:
    """As relu_(x) does: the result is the first argument itself, and nothing else is written to."""
    first, *others = func._schema.arguments
    writes = [a for a in others if a.alias_info is not None and a.alias_info.is_write]
    return first.alias_info is not None and first.alias_info.is_write and not writes and len(func._schema.returns) == 1


# -- operators that are not pointwise ------------------------------------------------------------------------------


def _batch_norm(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> Any:
    return None if training or not x.is_contiguous() else (torch.empty_like(x), x.new_empty(0), x.new_empty(0))


def _layer_norm(x: torch.Tensor, shape: list[int], *_: Any) -> Any:
    if not x.is_contiguous():
        return None
    kept = x.shape[: x.ndim - len(shape)] + (1,) * len(shape)
    return torch.empty_like(x), x.new_empty(kept), x.new_empty(kept)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor | None:
    return torch.empty_like(x) if x.is_contiguous() and not half_to_float else None


def _clone(x: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor | None:
    if memory_format is torch.contiguous_format or x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype)
    return None


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first = tensors[0]
    if not all(_contiguous(t) and t.ndim == first.ndim and t.dtype == first.dtype for t in tensors):
        return None
    size = list(first.shape)
    size[dim] = sum(t.shape[dim] for t in tensors)
    return torch.empty(size, dtype=first.dtype)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, *_: Any, **__: Any) -> Any:
    if dropout or v.shape[-1] != q.shape[-1]:
        return None
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1])).transpose(1, 2)


def _by_meta(func: Any) -> Any:
    """Size, type and layout by torch's own rule."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
        return torch.utils._pytree.tree_map_only(torch.Tensor, _allocated, func(*args, **kwargs))

    return rule


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


_RULES: dict[Any, Any] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten._softmax.default: _softmax,
    aten.clone.default: _clone,
    aten.cat.default: _cat,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.avg_pool2d.default: _by_meta(aten.avg_pool2d.default),
    aten.max_pool2d_with_indices.default: _by_meta(aten.max_pool2d_with_indices.default),
    aten.upsample_bilinear2d.default: _by_meta(aten.upsample_bilinear2d.default),
    aten.upsample_nearest2d.default: _by_meta(aten.upsample_nearest2d.default),
    # pointwise, but torch does not say so
    aten.hardswish.default: _clone,
    aten.hardswish_.default: lambda x: x,
}


def _tensors(args: tuple) -> list[torch.Tensor]:
    return [t for value in args for t in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(t, torch.Tensor)]  # fmt: skip


Size = tuple[tuple[int, ...], int]  # and how many multiplications


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Size | None:
    axes = x.ndim - 2
    known = len(stride) == len(padding) == len(dilation) == axes == weight.ndim - 2
    # a layout of channels last is passed on by some kernels and not by others
    if transposed or not known or not (_contiguous(x) and weight.is_contiguous()):
        return None
    places = (
        (size + 2 * pad - step * (kernel - 1) - 1) // jump + 1
        for size, kernel, pad, step, jump in zip(x.shape[2:], weight.shape[2:], padding, dilation, stride, strict=True)
    )
    size = (x.shape[0], weight.shape[0], *places)
    return size, math.prod(size) * math.prod(weight.shape[1:])


def _contiguous(x: torch.Tensor) -> bool:
    """And not channels last as well, as maps of one pixel or one channel are."""
    return x.is_contiguous() and not (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _mm(a: torch.Tensor, b: torch.Tensor) -> Size:
    return (a.shape[0], b.shape[1]), a.numel() * b.shape[1]


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> Size:
    return _mm(a, b)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> Size:
    return (a.shape[0], a.shape[1], b.shape[2]), a.numel() * b.shape[2]


def _baddbmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> Size:
    return _bmm(a, b)


_SIZES: dict[Any, Any] = {
    aten.convolution.default: _convolution,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
}
