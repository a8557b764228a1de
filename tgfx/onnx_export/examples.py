"""Inputs to trace and to prove with: the user's example, in other batch sizes and other extents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tgfx.errors import InputError

BATCH = "batch"


@dataclass(frozen=True)
class Examples:
    """One call of the model, and which axes of its tensors may change.

    leaves: the call's values as torch.export counts them; spec puts them together again as (args, kwargs).
    """

    leaves: tuple[Any, ...]
    spec: Any
    batched: bool
    free: dict[tuple[int, int], str] = field(default_factory=dict)  # (leaf, axis) -> name of the size

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], *, batched: bool) -> Examples:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.numel():
                raise InputError(
                    "the example is empty, so equality would prove nothing",
                    expected="at least one sample",
                    found=f"a tensor of shape {tuple(leaf.shape)}",
                )
        return cls(tuple(leaves), spec, batched)

    @property
    def batch(self) -> int:
        """Size of the first axis of the first tensor that has axes."""
        return next((leaf.shape[0] for leaf in self.leaves if isinstance(leaf, Tensor) and leaf.ndim), 1)

    def has_batch(self, leaf: Any) -> bool:
        return self.batched and isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.batch

    def call(self, batch: int | None = None, sizes: Mapping[str, int] | None = None) -> list[Any]:
        """The values at another batch size; each row differs from the one it was made from. sizes: of free axes."""
        dice = torch.Generator().manual_seed(0)
        values = []
        for place, leaf in enumerate(self.leaves):
            value = leaf
            if isinstance(leaf, Tensor):
                for axis in range(leaf.ndim):
                    wanted = (sizes or {}).get(self.free.get((place, axis), ""), leaf.shape[axis])
                    if wanted != leaf.shape[axis]:
                        value = value.index_select(axis, torch.arange(wanted) % leaf.shape[axis])
                if batch is not None and batch != self.batch and self.has_batch(leaf):
                    value = _rows(value, batch, dice)
            values.append(value)
        return values

    def arguments(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_unflatten(values, self.spec)


def _rows(value: Tensor, batch: int, dice: torch.Generator) -> Tensor:
    """As many rows as asked for. Numbers are shaken a little; whole numbers and masks are turned within their row, so
    that they stay in their vocabulary."""
    picked = value.index_select(0, torch.arange(batch) % value.shape[0])
    if picked.is_floating_point():
        shake = torch.rand(picked.shape, generator=dice, dtype=torch.float64) * 0.5 + 0.75
        return (picked.double() * shake).to(value.dtype)
    if picked.ndim < 2:
        return picked
    return torch.stack([row.roll(turn // value.shape[0], -1) for turn, row in enumerate(picked)])
