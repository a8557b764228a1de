"""Sizes that torch.export keeps free, hashed or printed by the model, or asked for their type.

A free size is printed as "s77": code that reads such a text would go its own way unnoticed. So where the model itself
makes a text of it, that is the number's, which export then takes for fixed (and which is checked in every call, see
assumed.py). Hashing it is a TypeError of torch's own; who catches more than that goes on as if it were in no table.
And `isinstance(x.shape[1], int)` is true, as it is in a call.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch

from tgfx.capture.asking import expects_type_error, is_message, is_of_torch, is_question

_KINDS: tuple[tuple[Any, type], ...] = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))


@contextmanager
def sizes_watched() -> Iterator[None]:
    """While a model is exported; TypeError at the end where it hashed a free size and went on."""
    hashed: list[str] = []
    with ExitStack() as stack:
        for kind, number in _KINDS:
            stack.enter_context(mock.patch.object(kind, "__repr__", _printing(kind.__repr__, number)))
            stack.enter_context(mock.patch.object(kind, "__hash__", _hashing(kind.__hash__, hashed)))
        stack.enter_context(mock.patch.object(builtins, "isinstance", _asking()))
        yield
    if hashed:
        raise TypeError(f"the model hashes a size that is free at {hashed[0]}")


def _printing(plain: Any, number: type) -> Any:
    def __repr__(size: Any) -> str:
        frame = sys._getframe(1)
        return repr(number(size)) if _is_models(frame) and not is_message(frame) else plain(size)

    return __repr__


def _hashing(plain: Any, hashed: list[str]) -> Any:
    def __hash__(size: Any) -> int:
        frame = sys._getframe(1)
        if _is_models(frame) and not expects_type_error(frame):
            hashed.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return plain(size)

    return __hash__


def _asking() -> Any:
    plain, numbers = isinstance, {kind: number() for kind, number in _KINDS}

    def asked(value: Any, kinds: Any, /) -> bool:
        number = numbers.get(type(value))
        if number is None or plain(value, kinds) or not _is_models(sys._getframe(1)):
            return plain(value, kinds)
        return plain(number, kinds)

    return asked


def _is_models(frame: FrameType) -> bool:
    return is_question(frame) and not is_of_torch(frame)
