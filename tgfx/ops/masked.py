"""Masked forms: statistics over living channels only.

Each takes a gate (1 living, 0 dead, broadcastable to the input) and equals the plain operator on the input with
the dead channels cut out. With all gates at one it is the plain operator.

    mean(x)            ->  sum(g x) / sum(g)
    layer_norm(x)      ->  (x - mean_g) / sqrt(var_g + eps) * w + b
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gate_times(tensor: Tensor, gate: Tensor) -> Tensor:
    """A tensor times its gate, in the tensor's own precision: gates are float32 also where the model is not."""
    return tensor * gate.to(tensor.dtype)


def spread(gate: Tensor, like: Tensor) -> Tensor:
    """As large as a value whose data movement it is to follow."""
    return gate.expand(like.shape)


def _wide(x: Tensor) -> Tensor:
    """In the precision in which torch's own kernels sum up."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _narrowed(out: Tensor, x: Tensor) -> Tensor:
    """In the precision of the input; autocast keeps results of normalisations wide."""
    return out if torch.is_autocast_enabled(x.device.type) else out.to(x.dtype)


def _weighted_mean(x: Tensor, gate: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    gate = gate.to(x.dtype)
    mean = (x * gate).sum(dims, keepdim=True) / _count(x, gate, dims)
    return mean if keepdim else _dropped(mean, dims)


def _count(x: Tensor, gate: Tensor, dims: list[int]) -> Tensor:
    """How many living entries are reduced, per entry that is kept."""
    repeats = 1
    for d in dims:  # axes on which the gate is constant count in full
        if gate.shape[d] == 1:
            repeats = repeats * x.shape[d]
    return _some(gate.sum(dims, keepdim=True)) * repeats


def _some(living: Tensor) -> Tensor:
    """Never 0: gates that all close for a while give zeros then, where 0 / 0 would spoil every weight for good."""
    return living.clamp_min(0.5)


def _dropped(x: Tensor, dims: list[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.squeeze(d)
    return x


def _axes(dim: object, ndim: int) -> list[int]:
    if dim is None:
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)  # type: ignore[call-overload]
    return [d % ndim for d in dims] or list(range(ndim))


def masked_mean(
    x: Tensor, gate: Tensor, dim: object = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    mean = _weighted_mean(_wide(x if dtype is None else x.to(dtype)), gate, _axes(dim, x.ndim), keepdim)
    return mean.to(x.dtype if dtype is None else dtype)


def masked_var(x: Tensor, gate: Tensor, dim: object = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    return _var(x, gate, dim, correction, keepdim).to(x.dtype)


def masked_std(x: Tensor, gate: Tensor, dim: object = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    var = _var(x, gate, dim, correction, keepdim)
    none = var == 0  # there torch.std has a gradient of 0, and the root has none that is finite
    return torch.where(none, 0, torch.where(none, 1, var).sqrt()).to(x.dtype)


def _var(x: Tensor, gate: Tensor, dim: object, correction: float, keepdim: bool) -> Tensor:
    dims, wide = _axes(dim, x.ndim), _wide(x)
    gate = gate.to(wide.dtype)
    centred = wide - _weighted_mean(wide, gate, dims, True)
    squares = (centred.square() * gate).sum(dims, keepdim=True)
    degrees = (_count(wide, gate, dims) - float(correction)).clamp_min(0)  # a bool says: unbiased
    var = squares / torch.where(gate.sum(dims, keepdim=True) > 0, degrees, 1)
    return var if keepdim else _dropped(var, dims)


def masked_layer_norm(
    x: Tensor, gate: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise over the last len(shape) axes, counting living entries only."""
    dims, wide = list(range(x.ndim - len(shape), x.ndim)), _wide(x)
    centred = wide - _weighted_mean(wide, gate, dims, True)
    out = centred * torch.rsqrt(_weighted_mean(centred.square(), gate, dims, True) + eps)
    return _narrowed(_affine(out, weight, bias), x)


def masked_rms_norm(x: Tensor, gate: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    dims, wide = list(range(x.ndim - len(shape), x.ndim)), _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    out = wide * torch.rsqrt(_weighted_mean(wide.square(), gate, dims, True) + eps)
    return _narrowed(_affine(out, weight, None), x)


def masked_group_norm(
    x: Tensor, gate: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Gate has the input's rank and varies on axis 1 only; living channels are equally many in every group."""
    batch, channels = x.shape[0], x.shape[1]
    if channels == groups:
        return F.group_norm(x, groups, weight, bias, eps)
    grid = _wide(x).reshape(batch, groups, channels // groups, -1)
    line = gate[(slice(0, 1), slice(None), *[slice(0, 1)] * (gate.ndim - 2))]  # it may come as large as the input
    mask = line.reshape(1, groups, channels // groups, 1).to(grid.dtype)
    count = _some(mask.sum(2, keepdim=True)) * grid.shape[-1]
    mean = (grid * mask).sum((2, 3), keepdim=True) / count
    centred = grid - mean
    var = (centred.square() * mask).sum((2, 3), keepdim=True) / count
    out = (centred * torch.rsqrt(var + eps)).reshape(x.shape)
    return _narrowed(_affine(out, weight, bias, [1, channels] + [1] * (x.ndim - 2)), x)


def masked_batch_norm(
    x: Tensor,
    gate: Tensor,
    running_mean: None,
    running_var: None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Without running statistics: normalise each entry of axis 1 over all other axes, living entries only."""
    dims, wide = [axis for axis in range(x.ndim) if axis != 1], _wide(x)
    centred = wide - _weighted_mean(wide, gate, dims, True)
    out = centred * torch.rsqrt(_weighted_mean(centred.square(), gate, dims, True) + eps)
    return _narrowed(_affine(out, weight, bias, [-1 if axis == 1 else 1 for axis in range(x.ndim)]), x)


def _affine(out: Tensor, weight: Tensor | None, bias: Tensor | None, line: list[int] | None = None) -> Tensor:
    """`line`: the shape that brings weight and bias to the axis they are for."""
    for tensor, join in ((weight, torch.mul), (bias, torch.add)):
        if tensor is not None:
            out = join(out, (tensor if line is None else tensor.reshape(line)).to(out.dtype))
    return out


# layers that have a masked form; of functions see tgfx.ops.masked_call
MASKED_MODULES = {"LayerNorm", "GroupNorm", "RMSNorm"}
