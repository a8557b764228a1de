"""Tensors (parameters, buffers, inputs) as they were before a model ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tgfx.ir.writes import has_memory, memory_of, written_by


class KeptState:
    """Copies what is about to be written to, and only that: most models write to nothing in eval mode."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._own: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if has_memory(tensor):
                same = self._own.setdefault(memory_of(tensor), [])
                if not any(tensor is other for other in same):
                    same.append(tensor)
        self._before: dict[int, list[torch.Tensor]] = {}

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        """To be told of every call before it is made."""
        if not self._own:
            return
        written = written_by(func, args, kwargs)
        memories = self._own if written is None else map(memory_of, written)
        for memory in memories:
            if memory in self._own and memory not in self._before:
                self._before[memory] = [tensor.detach().clone() for tensor in self._own[memory]]

    def restore(self) -> None:
        with torch.no_grad():
            for memory, copies in self._before.items():
                for tensor, values in zip(self._own[memory], copies, strict=True):
                    if not torch.equal(tensor, values):
                        tensor.copy_(values)
        self._before.clear()
