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
    return gate.sum(dims, keepdim=True) * repeats


def _dropped(x: Tensor, dims: list[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.squeeze(d)
    return x


def _axes(dim: object, ndim: int) -> list[int]:
    if dim is None:
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)  # type: ignore[call-overload]
    return [d % ndim for d in dims] or list(range(ndim))


def masked_mean(x: Tensor, gate: Tensor, dim: object = None, keepdim: bool = False) -> Tensor:
    return _weighted_mean(x, gate, _axes(dim, x.ndim), keepdim)


def masked_var(x: Tensor, gate: Tensor, dim: object = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    dims = _axes(dim, x.ndim)
    gate = gate.to(x.dtype)
    centred = x - _weighted_mean(x, gate, dims, True)
    squares = (centred.square() * gate).sum(dims, keepdim=True)
    var = squares / (_count(x, gate, dims) - correction).clamp_min(0)
    return var if keepdim else _dropped(var, dims)


def masked_std(x: Tensor, gate: Tensor, dim: object = None, correction: float = 1, keepdim: bool = False) -> Tensor:
    return masked_var(x, gate, dim, correction, keepdim).sqrt()


def masked_layer_norm(
    x: Tensor, gate: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise over the last len(shape) axes, counting living entries only."""
    dims = list(range(x.ndim - len(shape), x.ndim))
    gate = gate.to(x.dtype)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = _weighted_mean(wide, gate, dims, True)
    centred = wide - mean
    var = _weighted_mean(centred.square(), gate, dims, True)
    out = (centred * torch.rsqrt(var + eps)).to(x.dtype)
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


def masked_rms_norm(x: Tensor, gate: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    dims = list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    out = (wide * torch.rsqrt(_weighted_mean(wide.square(), gate, dims, True) + eps)).to(x.dtype)
    return out if weight is None else out * weight


def masked_group_norm(
    x: Tensor, gate: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Gate has the input's rank and varies on axis 1; living channels are equally many in every group."""
    batch, channels = x.shape[0], x.shape[1]
    if channels == groups:
        return F.group_norm(x, groups, weight, bias, eps)
    grid = x.reshape(batch, groups, channels // groups, -1)
    mask = gate.reshape(1, groups, channels // groups, 1).to(x.dtype)
    count = mask.sum(2, keepdim=True) * grid.shape[-1]
    mean = (grid * mask).sum((2, 3), keepdim=True) / count
    centred = grid - mean
    var = (centred.square() * mask).sum((2, 3), keepdim=True) / count
    out = (centred * torch.rsqrt(var + eps)).reshape(x.shape)
    line = [1, channels] + [1] * (x.ndim - 2)
    if weight is not None:
        out = out * weight.reshape(line)
    return out if bias is None else out + bias.reshape(line)


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
    dims = [axis for axis in range(x.ndim) if axis != 1]
    centred = x - _weighted_mean(x, gate, dims, True)
    out = centred * torch.rsqrt(_weighted_mean(centred.square(), gate, dims, True) + eps)
    line = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    if weight is not None:
        out = out * weight.reshape(line)
    return out if bias is None else out + bias.reshape(line)


# canonical operator or module name -> masked form exists
MASKED_FUNCTIONS = {"mean", "var", "std", "layer_norm", "group_norm", "rms_norm", "batch_norm"}
MASKED_MODULES = {"LayerNorm", "GroupNorm", "RMSNorm"}
