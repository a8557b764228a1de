"""How many samples the gradients of an optimizer step are made of, counted at the model's calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tgfx.sharding import is_sharded
from tgfx.training.batches import samples_in


class SampleCount:
    """Counts until `take`; anew where gradients were made and thrown away, as by a GradScaler that skips a step."""

    def __init__(self) -> None:
        self._counted = 0
        self._told = 0
        self._backward = False

    @property
    def total(self) -> int:
        """0 if there was nothing to see; what a loop says counts where the calls cannot be seen (compiled)."""
        return self._counted or self._told

    def tell(self, count: int) -> None:
        self._told += count

    def take(self) -> int:
        """The samples of a step that has been made."""
        total = self.total
        self._counted = self._told = 0
        self._backward = False
        return total

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, gates: Iterable[Tensor]) -> None:
        """A call of the model. `gates`: whose gradients tell whether the last ones still count."""
        if self._backward and all(_is_gone(gate.grad) for gate in gates):
            self.take()
        self._counted += samples_in(args, kwargs)
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._in_backward)

    def _in_backward(self, gradient: Tensor) -> None:
        self._backward = True


def _is_gone(gradient: Tensor | None) -> bool:
    """None, or set to zeros: a rank may have no part of a sharded one at all, which says nothing."""
    if gradient is None:
        return True
    own: Tensor = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    return own.numel() > 0 and not bool(own.any())
