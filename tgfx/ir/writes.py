"""Which of its arguments an ATen operator writes to, and what memory a tensor has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

aten = torch.ops.aten
# write to their running statistics in train mode, though their schema does not say so
_SILENT_WRITERS = frozenset((aten.native_batch_norm.default, aten.cudnn_batch_norm.default))
_TRAINING = 5  # argument of both

_WRITTEN: dict[Any, tuple[Callable, ...] | None] = {}


def written_by(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor] | None:
    """Tensors that this call writes to; None if nobody can tell (the operator is not torch's own)."""
    if func not in _WRITTEN:
        _WRITTEN[func] = tuple(_writers(func)) if func.namespace == "aten" else None
    writers = _WRITTEN[func]
    if writers is None:
        return None
    if func in _SILENT_WRITERS:
        return [t for t in args[3:5] if isinstance(t, torch.Tensor)] if args[_TRAINING] else []
    found = []
    for argument in writers:
        value = argument(args, kwargs)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                found.append(tensor)
    return found


def _writers(func: Any) -> Iterable[Callable]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield lambda args, kwargs, i=index, n=argument.name: args[i] if i < len(args) else kwargs.get(n)


def memory_of(tensor: torch.Tensor) -> int:
    """The same number for all tensors that share memory."""
    return tensor.untyped_storage()._cdata


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own kind of tensor, with a storage that may be shared."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def is_plain(tensor: torch.Tensor) -> bool:
    """Memory on the CPU that keeps count of writes to it."""
    return has_memory(tensor) and tensor.device.type == "cpu" and not tensor.is_inference()
