"""Copies of tensors that share the memory of the original until one of the two is written to.

torch does the bookkeeping (copy on write): the first write to either, by whatever way torch knows of, gives it memory
of its own. Ways that torch does not know of are raw pointers, so memory that something else holds on to (an array of
numpy, a view) is copied at once, as is memory that is not torch's own (mapped files, memory shared between processes).
"""

from __future__ import annotations

import torch

# the tensor, and the storage object that is made to ask
_NO_OTHER_HOLDER = 2
_storage_holders = getattr(torch._C, "_storage_Use_Count", None)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """What `tensor.detach().clone()` gives; the tensor is the whole of its storage."""
    if tensor.device.type == "cpu" and _held_by_nobody_else(tensor):
        try:
            with torch.no_grad():
                return torch._lazy_clone(tensor).detach()
        except (RuntimeError, AttributeError):
            pass  # not torch's own memory, or a torch that cannot do it
    return tensor.detach().clone()


def _held_by_nobody_else(tensor: torch.Tensor) -> bool:
    return _storage_holders is not None and _storage_holders(tensor.untyped_storage()._cdata) == _NO_OTHER_HOLDER
