"""What loaders give: (inputs, target), a dict of keyword arguments, or the input alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


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


def call_model(model: nn.Module, batch: Any) -> Any:
    args, kwargs = inputs_of(batch)
    return model(*args, **kwargs)
