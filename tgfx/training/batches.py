"""What loaders give: (inputs, target), a dict of keyword arguments, or the input alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def inputs_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments in a batch: all of a dict, the first of a tuple or list, or the batch itself."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list) and len(batch):
        first = batch[0]
        if isinstance(first, Mapping):
            return (), dict(first)
        return (tuple(first) if isinstance(first, tuple | list) else (first,)), {}
    return (batch,), {}


def samples_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many samples a call of the model is given: the length of its first tensor; 0 if there is none."""
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim), None)
    return 0 if first is None else first.shape[0]


def call_model(model: nn.Module, batch: Any) -> Any:
    args, kwargs = inputs_of(batch)
    return model(*args, **kwargs)
