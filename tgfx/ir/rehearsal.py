"""The calls that a model makes, in order; and a second program that has to make the very same ones.

    first run     conv(x, w) -> y    relu_(y)    add(y, x) -> z    output z
    second run    conv(x, w)         relu_(y)    add(y, x)         output z

If each call of the second run is that of the first, on the very same tensors, and ends with the same ones, then both
programs compute the same, whatever the numbers are. So costly operators are not computed at all: their results are
hollow. Whatever would look into a hollow tensor ends the rehearsal, as does any difference (RehearsalEndedError): the
two have then to be compared by what they give. Views are no calls: one more or less changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tgfx.ir import hollow
from tgfx.ir.kept_state import KeptState
from tgfx.ir.recording import Recording
from tgfx.ir.writes import has_memory, memory_of, written_by

MOST_BYTES = 1 << 30  # of results that had to be computed


class RehearsalEndedError(Exception):
    """Nothing can be said without computing."""


@dataclass(frozen=True)
class _Call:
    func: Any
    args: tuple
    kwargs: dict
    result: Any


class Rehearsal:
    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._next = 0
        self._hollow: set[int] = set()  # memory that holds no true numbers
        self._room = MOST_BYTES

    def recording(self, state: KeptState) -> Recording:
        """The mode for the first run; `state` is told what is written to."""
        return Recording(self, state)

    def first_call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result = self._result(func, args, kwargs)
        if not func.is_view:
            self._calls.append(_Call(func, args, kwargs, result))
        return result

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Of the second run."""
        if func.is_view:
            return func(*args, **kwargs)
        known = self._calls[self._next] if self._next < len(self._calls) else None
        if known is None or known.func is not func or not (_same(known.args, args) and _same(known.kwargs, kwargs)):
            raise RehearsalEndedError(f"{func} is not what the model calls next")
        self._next += 1
        return known.result

    def ends_with(self, first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
        """Whether the second run is over, and gave what the first did."""
        return self._next == len(self._calls) and _same(first, second)

    def is_hollow(self, tensor: torch.Tensor) -> bool:
        return has_memory(tensor) and memory_of(tensor) in self._hollow

    def clear(self) -> None:
        self._calls.clear()
        self._hollow.clear()

    def _result(self, func: Any, args: tuple, kwargs: dict) -> Any:
        made = hollow.product(func, args) if not kwargs else None
        if made is not None:
            self._hollow.add(memory_of(made))
            return made
        operands = [t for t in _tensors(args, kwargs) if self.is_hollow(t)]
        if not operands:
            result = func(*args, **kwargs)
            self._take_room(result)
            return result
        if func.is_view:
            return func(*args, **kwargs)
        if not all(t.is_floating_point() for t in operands):
            raise RehearsalEndedError(f"{func} looks at numbers")
        result = hollow.passed_on(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
            self._take_room(result)
            if not all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in _leaves(result)):
                raise RehearsalEndedError(f"{func} looks at numbers")
        written = written_by(func, args, kwargs)
        if written is None:
            raise RehearsalEndedError(f"{func} is not known")
        self._hollow.update(map(memory_of, filter(has_memory, (*written, *_tensors((result,), {})))))
        return result

    def _take_room(self, result: Any) -> None:
        self._room -= sum(t.nbytes for t in _tensors((result,), {}) if has_memory(t))
        if self._room < 0:
            raise RehearsalEndedError("too much to keep")


def _same(a: Any, b: Any) -> bool:
    """The same tensors (memory, place, size, layout, type) and equal values in the same places."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _same_tensor(a, b)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        has_memory(a) and has_memory(b)
        and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset() and memory_of(a) == memory_of(b)
        and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
    )  # fmt: skip


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [leaf for leaf in (*_leaves(args), *_leaves(kwargs.values())) if isinstance(leaf, torch.Tensor)]


def _leaves(value: Any) -> list[Any]:
    """Operators take and give lists of tensors, one level deep."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__iter__") or isinstance(value, str):
        return [value]
    flat: list[Any] = []
    for item in value:
        flat.extend(item if isinstance(item, list | tuple) else (item,))
    return flat
