"""How many samples the gradients of an optimizer step are made of, counted at the model's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tgfx.sharding import is_sharded
from tgfx.training.batches import samples_in


class SampleCount:
    """Calls count as backward comes to them, until `take`; anew where gradients were thrown away in between.

    So does a loop whose GradScaler leaves a step out.
    """

    def __init__(self, gates: Sequence[Tensor]) -> None:
        """`gates`: whose gradients tell whether those of earlier calls are still there."""
        self._gates = gates
        self._called = 0
        self._counted = 0
        self._told = 0
        self._backward = -1  # number of the last that was seen

    @property
    def total(self) -> int:
        """Where backward cannot be seen, of all calls; where these cannot (compiled), what a loop says; or 0."""
        return self._counted or self._called or self._told

    def tell(self, count: int) -> None:
        self._told += count

    def begin(self, gates: Sequence[Tensor]) -> None:
        """A step has been made."""
        self._gates = gates
        self._called = self._counted = self._told = 0

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """The model has been called."""
        samples = samples_in(args, kwargs)
        self._called += samples
        left = [samples]  # until one of its outputs is come to
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._in_backward, left))

    def _in_backward(self, left: list[int], gradient: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number != self._backward and all(_is_gone(gate.grad) for gate in self._gates):
            self._counted = 0
        self._backward = number
        self._counted += left.pop() if left else 0


def _is_gone(gradient: Tensor | None) -> bool:
    """None, or set to zeros: a rank may have no part of a sharded one at all, which says nothing."""
    if gradient is None:
        return True
    own: Tensor = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    return own.numel() > 0 and not bool(own.any())
