"""A weight times its trainable gates, with next to nothing saved for backward.

    gated = w · TG(v)        d/dw = TG(v)        d/dv = w · TG′(v)

Only w and v themselves are kept, which are parameters anyhow: no mask, no gate values. All work is done in blocks of
rows, so that transient buffers stay small next to a weight of a hundred million entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tgfx.gates import GateSettings

BLOCK = 1 << 18  # entries that are worked on at a time: they stay in the cache


def row_blocks(shape: torch.Size) -> Iterator[slice]:
    """Slices of the first axis, of about BLOCK entries each."""
    rows = max(1, BLOCK // max(1, shape[1:].numel()))
    for start in range(0, shape[0], rows):
        yield slice(start, start + rows)


def gated_weight(weight: Tensor, latent: Tensor, settings: GateSettings) -> Tensor:
    """w · TG(v), without a gradient: what the function below gives, computed again."""
    out = torch.empty_like(weight)
    with torch.no_grad():
        for rows in row_blocks(weight.shape):
            torch.mul(weight[rows], settings.trained(latent[rows]).to(weight.dtype), out=out[rows])
    return out


class GatedWeight(torch.autograd.Function):
    """(w · TG(v), sum of TG(v)); the sum is there so that a budget's gradient comes in the same pass over v.

    Inputs are kept on the context, not saved for backward: a budget may be differentiated after the loss, through this
    very node, and there is nothing to free. What torch would check for saved tensors is checked here.
    `owned`: the one reader of the gated weight makes its gradient afresh, so it may be overwritten.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, latent: Tensor, settings: GateSettings, owned: bool) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.latent, ctx.settings, ctx.owned = weight, latent, settings, owned
        ctx.versions = weight._version, latent._version
        ctx.set_materialize_grads(False)
        out = torch.empty_like(weight)
        # summed up in place: a small result kept from every block would pin the block's memory in a heap
        total = torch.zeros((), dtype=torch.float64, device=latent.device)
        for rows in row_blocks(weight.shape):
            value = settings.trained(latent[rows])
            total += value.sum(dtype=torch.float64)
            torch.mul(weight[rows], value.to(weight.dtype), out=out[rows])
        return out, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, price: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_unchanged((ctx.weight, ctx.latent), ctx.versions)
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: plain operators, which can be differentiated again
            found = _differentiable(ctx.weight, ctx.latent, ctx.settings, gradient, price)
        elif gradient is None:
            found = None, count_gradient(ctx.latent, ctx.settings, price) if price is not None and wanted[1] else None
        else:
            found = _in_blocks(ctx, gradient, price, wanted)
        return (*(g if want else None for g, want in zip(found, wanted, strict=True)), None, None)


def _in_blocks(
    ctx: Any, gradient: Tensor, price: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    weight, latent, settings = ctx.weight, ctx.latent, ctx.settings
    for_latent = torch.empty_like(latent) if wanted[1] else None
    for_weight = None
    if wanted[0]:
        reuse = ctx.owned and gradient.is_contiguous() and gradient.dtype == weight.dtype
        for_weight = gradient if reuse else torch.empty_like(weight)
    for rows in row_blocks(weight.shape):
        own = gradient[rows]
        if for_latent is not None:
            part = own.to(latent.dtype) * weight[rows].to(latent.dtype)
            if price is not None:
                part += price.to(latent.dtype)
            slope = settings.slope(latent[rows])
            for_latent[rows] = part if slope is None else part.mul_(slope)
        if for_weight is not None:
            torch.mul(own, settings.trained(latent[rows]).to(own.dtype), out=for_weight[rows])
    return for_weight, for_latent


def _differentiable(
    weight: Tensor, latent: Tensor, settings: GateSettings, gradient: Tensor | None, price: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    value = settings.trained(latent)
    toward = torch.zeros_like(latent)
    if gradient is not None:
        toward = toward + (gradient * weight).to(latent.dtype)
    if price is not None:
        toward = toward + price.to(latent.dtype)
    for_latent = toward * _slope_with_graph(settings, latent)
    return None if gradient is None else gradient * value.to(gradient.dtype), for_latent


class OpenSum(torch.autograd.Function):
    """Sum of factor · TG(v); `factor` broadcasts to the shape of v."""

    @staticmethod
    def forward(ctx: Any, latent: Tensor, settings: GateSettings, factor: Tensor) -> Tensor:
        ctx.latent, ctx.settings, ctx.factor, ctx.version = latent, settings, factor, latent._version
        return weighted_sum(latent, settings.trained, factor)

    @staticmethod
    def backward(ctx: Any, price: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_unchanged((ctx.latent,), (ctx.version,))
        if torch.is_grad_enabled():
            slope = _slope_with_graph(ctx.settings, ctx.latent)
            return (price * ctx.factor).to(ctx.latent.dtype) * slope, None, None
        return count_gradient(ctx.latent, ctx.settings, price * ctx.factor), None, None


def weighted_sum(latent: Tensor, function: Any, factor: Tensor) -> Tensor:
    """Sum of factor · function(v), in float64: exact for counts."""
    total = torch.zeros((), dtype=torch.float64, device=latent.device)
    with torch.no_grad():
        for rows in row_blocks(latent.shape):
            value = function(latent[rows])
            if factor.numel() > 1:
                value = value * (factor[rows] if factor.shape[0] > 1 else factor)
            total += value.sum(dtype=torch.float64)
        return total * factor.reshape(()) if factor.numel() == 1 else total


def count_gradient(latent: Tensor, settings: GateSettings, price: Tensor) -> Tensor:
    """price · TG′(v); where that is the same for all, one number that only looks like a whole tensor."""
    price = price.to(latent.dtype)
    if settings.shape == "constant":
        return price.expand_as(latent)
    out = torch.empty_like(latent)
    for rows in row_blocks(latent.shape):
        own = price[rows] if price.ndim and price.shape[0] > 1 else price
        torch.mul(settings.slope(latent[rows]), own, out=out[rows])
    return out


def _slope_with_graph(settings: GateSettings, latent: Tensor) -> Tensor:
    value = settings.trained(latent)
    if settings.shape == "constant" or not latent.requires_grad:
        return torch.ones_like(latent)
    (slope,) = torch.autograd.grad(value, latent, torch.ones_like(value), create_graph=True)
    return slope


def check_unchanged(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """As torch does for tensors that it saved itself."""
    if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "a weight or its gates changed (an optimizer step?) between forward and backward"
        )
