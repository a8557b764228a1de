"""Convolutions and linear layers that do not keep their gated weight for backward, but compute it again.

    F.conv2d(x, gated, bias)  ->  lean_conv2d(gated, x, gated, bias)

The same function; autograd saves how the gated weight was made instead of its entries, which for VGG-16 is half a
gigabyte less. Other saved tensors are handed to whoever else listens (activation checkpointing, offloading).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tgfx.gates import GateSettings
from tgfx.ops.weight_gate import check_unchanged, gated_weight

_RECIPE = "_tgfx_recipe"


@dataclass(frozen=True)
class Recipe:
    """How a gated weight was made."""

    weight: Tensor
    latent: Tensor
    settings: GateSettings


@dataclass(frozen=True)
class _Saved:
    """A view of the gated weight, to be made again."""

    recipe: Recipe
    versions: tuple[int, int]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restored(self) -> Tensor:
        recipe = self.recipe
        check_unchanged((recipe.weight, recipe.latent), self.versions)
        whole = gated_weight(recipe.weight.detach(), recipe.latent.detach(), recipe.settings)
        return whole.as_strided(self.size, self.stride, self.offset)


def remember(gated: Tensor, recipe: Recipe) -> None:
    setattr(gated, _RECIPE, recipe)


def leanly(function: Callable[..., Tensor], gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """function(*args, **kwargs), one of whose operands is (a view of) `gated`."""
    recipe: Recipe | None = getattr(gated, _RECIPE, None)
    if recipe is None or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    memory = gated.untyped_storage()._cdata
    versions = recipe.weight._version, recipe.latent._version

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata == memory:
            return _Saved(recipe, versions, tensor.shape, tensor.stride(), tensor.storage_offset())
        return outer[0](tensor) if outer else (tensor, tensor._version)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _Saved):
            return saved.restored()
        if outer:
            return outer[1](saved)
        check_unchanged((saved[0],), (saved[1],))  # torch checks this only where no hook listens
        return saved[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function(*args, **kwargs)


def lean_linear(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.linear, gated, *args, **kwargs)


def lean_conv1d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv1d, gated, *args, **kwargs)


def lean_conv2d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv2d, gated, *args, **kwargs)


def lean_conv3d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv3d, gated, *args, **kwargs)


def lean_conv_transpose1d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv_transpose1d, gated, *args, **kwargs)


def lean_conv_transpose2d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv_transpose2d, gated, *args, **kwargs)


def lean_conv_transpose3d(gated: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return leanly(F.conv_transpose3d, gated, *args, **kwargs)


# canonical operator name (tgfx.ops.naming) -> its lean form
LEAN: dict[str, Callable[..., Tensor]] = {
    "linear": lean_linear,
    "conv1d": lean_conv1d,
    "conv2d": lean_conv2d,
    "conv3d": lean_conv3d,
    "conv_transpose1d": lean_conv_transpose1d,
    "conv_transpose2d": lean_conv_transpose2d,
    "conv_transpose3d": lean_conv_transpose3d,
}
