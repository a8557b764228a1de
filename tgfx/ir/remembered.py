"""What costly operators gave in one run, for a second run that comes to the very same operands.

    reference run    conv(x, w) -> y        kept: x, w, y
    analysing run    conv(x', w)            x' is x bit by bit: the answer is y, without computing it

Only operators that are functions of their operands are kept, and an answer is given only where every operand is proven
to be what it was: the same memory, unchanged since, or equal in every bit. Whatever is written to afterwards is
forgotten. So the second run computes what it would have computed anyway, however it is wired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tgfx.ir.kept_state import KeptState
from tgfx.ir.recording import Recording
from tgfx.ir.writes import is_plain, memory_of, written_by

aten = torch.ops.aten
COSTLY = frozenset(
    (
        aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten.gelu.default, aten.avg_pool2d.default,
        aten.max_pool2d_with_indices.default, aten.upsample_bilinear2d.default,
    )
)  # fmt: skip
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
MOST_BYTES = 1 << 30
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Stamp = tuple[torch.Tensor, int]  # a tensor and its version when it was seen


@dataclass
class _Answer:
    operands: list[Stamp]
    outputs: list[Stamp]
    value: Any
    forgotten: bool = False

    def forget(self) -> None:
        self.forgotten, self.operands, self.outputs, self.value = True, [], [], None


class Remembered:
    """Answers of one run; each is given out once, for two calls never share a result."""

    def __init__(self) -> None:
        self._answers: dict[tuple, list[_Answer]] = {}
        self._of_memory: dict[int, list[_Answer]] = {}
        self._room = MOST_BYTES

    def recording(self, state: KeptState) -> Recording:
        """While this mode is on, calls of costly operators are kept, and `state` is told what is written to."""
        return Recording(self, state)

    def first_call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        value = func(*args, **kwargs)
        self.note_writes(func, args, kwargs)
        if func in COSTLY:
            self.keep(func, args, kwargs, value)
        return value

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """func(*args, **kwargs), remembered where that is known to be the same."""
        value = None
        if func in COSTLY:
            value = self._recalled(func, args, kwargs)
        if value is None:
            value = func(*args, **kwargs)
        self.note_writes(func, args, kwargs)
        return value

    def keep(self, func: Any, args: tuple, kwargs: dict, value: Any) -> None:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        outputs = [value] if isinstance(value, torch.Tensor) else [v for v in value if isinstance(v, torch.Tensor)]
        if not _repeats(func, args) or not all(map(is_plain, (*operands, *outputs))):
            return
        self._room -= sum(t.nbytes for t in (*operands[:1], *outputs))
        if self._room < 0:
            return
        answer = _Answer([(t, t._version) for t in operands], [(t, t._version) for t in outputs], value)
        self._answers.setdefault(_key(func, args, kwargs), []).append(answer)
        for tensor in (*operands, *outputs):
            self._of_memory.setdefault(memory_of(tensor), []).append(answer)

    def note_writes(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Forget what concerned memory that this call writes to."""
        written = written_by(func, args, kwargs)
        if written is None:
            self.clear()
            return
        for tensor in written:
            for answer in self._of_memory.pop(memory_of(tensor), ()):
                answer.forget()

    def clear(self) -> None:
        self._answers.clear()
        self._of_memory.clear()

    def _recalled(self, func: Any, args: tuple, kwargs: dict) -> Any:
        answers = self._answers.get(_key(func, args, kwargs), [])
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for index, answer in enumerate(answers):
            if answer.forgotten or any(t._version != version for t, version in answer.outputs):
                continue
            if all(map(_same, operands, answer.operands)):
                del answers[index]
                return answer.value
        return None


def _key(func: Any, args: tuple, kwargs: dict) -> tuple:
    """What a call is made of but for the numbers in its tensors."""
    return (func, *map(_plain, args), *kwargs, *map(_plain, kwargs.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else (type(value), value)


def _repeats(func: Any, args: tuple) -> bool:
    """Attention that drops at random gives something else each time."""
    return func is not _ATTENTION or len(args) < 4 or not args[3]


def _same(tensor: torch.Tensor, stamp: Stamp) -> bool:
    """Whether `tensor` holds, bit by bit, what the stamped one held."""
    other, version = stamp
    if other._version != version or not is_plain(tensor):
        return False
    if tensor.shape != other.shape or tensor.stride() != other.stride() or tensor.dtype != other.dtype:
        return False
    # not by data_ptr: whoever asks for that may write there, so shared memory would be copied
    if memory_of(tensor) == memory_of(other) and tensor.storage_offset() == other.storage_offset():
        return True
    bits = _BITS.get(tensor.element_size())
    return bits is not None and torch.equal(tensor.view(bits), other.view(bits))
