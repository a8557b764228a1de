"""A deep copy of a model, as copy.deepcopy makes it, in a fraction of its time.

Most of what deepcopy spends on a model goes into asking every number and every empty hook table how it wants to be
copied. Plain modules, tables, numbers and tensors are copied here; whatever has a say of its own (`__deepcopy__`,
`__reduce__`, `__getstate__`, a tensor subclass ...) goes to copy.deepcopy, with the memo shared, so that what was one
object stays one object.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from tgfx.capture.shared_memory import lazy_clone

_ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, torch.dtype)
)
_TABLES = (dict, OrderedDict)

Memo = dict[Any, Any]


def copy_model(model: nn.Module) -> nn.Module:
    """What copy.deepcopy(model) gives."""
    return _copy(model, {})


def _copy(value: Any, memo: Memo) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in _TABLES:
        return _table(value, memo)
    if kind in (tuple, list, set) and all(type(item) in _ATOMS for item in value):
        return value if kind is tuple else memo.setdefault(id(value), kind(value))
    if kind is nn.Parameter:
        return _parameter(value, memo) if _owns_its_memory(value, memo) else value.__deepcopy__(memo)
    if kind is torch.Tensor and not value.requires_grad and _owns_its_memory(value, memo):
        return _tensor(value, memo)
    if isinstance(value, nn.Module) and _is_plain(kind) and "__deepcopy__" not in value.__dict__:
        return _module(value, memo)
    return copy.deepcopy(value, memo)


def _table(value: dict, memo: Memo) -> dict:
    twin = memo[id(value)] = type(value)()
    for key, item in value.items():
        twin[_copy(key, memo)] = _copy(item, memo)
    return twin


@cache
def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether the class leaves copying to object.__reduce_ex__: a new object with a copy of `__dict__`."""
    return (
        kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__getstate__ in (nn.Module.__getstate__, getattr(object, "__getstate__", None))
        and kind.__new__ is object.__new__
        and not hasattr(kind, "__deepcopy__")
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and not any(slot for base in kind.__mro__ for slot in _slots(base))
        and not issubclass(kind, list | dict)
    )


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _module(module: nn.Module, memo: Memo) -> nn.Module:
    twin = memo[id(module)] = object.__new__(type(module))
    # the state is a table of the moment: its own id must not get into the memo
    twin.__setstate__({key: _copy(value, memo) for key, value in module.__getstate__().items()})
    return twin


def _owns_its_memory(tensor: torch.Tensor, memo: Memo) -> bool:
    """A tensor that is the whole of a storage, which nothing copied so far shares, and carries nothing else."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_leaf
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and not tensor.__dict__
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and tensor.untyped_storage()._cdata not in memo.get("torch", ())
    )


def _parameter(parameter: nn.Parameter, memo: Memo) -> nn.Parameter:
    """As torch's own, the parameter does not take its gradient along."""
    twin = memo[id(parameter)] = nn.Parameter(lazy_clone(parameter), parameter.requires_grad)
    return twin


def _tensor(tensor: torch.Tensor, memo: Memo) -> torch.Tensor:
    twin = memo[id(tensor)] = lazy_clone(tensor)
    # where torch's own deepcopy looks for storages that it has copied: another tensor in this one's memory finds it
    memo.setdefault("torch", {})[tensor.untyped_storage()._cdata] = twin.untyped_storage()
    return twin
