"""Comparisons of a uniform random number that come out the same whatever is drawn.

    if torch.rand([]) < 0.0: ...          never: torch.rand is in [0, 1)

So Hugging Face asks whether to skip a layer in train mode (LayerDrop), with a probability of 0 as a rule. torch.export
stops there, since it knows no numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_AT_ZERO = {"lt": False, "__lt__": False, "less": False, "ge": True, "__ge__": True, "greater_equal": True}


class UniformDraws(TorchFunctionMode):
    """Answers such comparisons of single numbers, with a plain bool, so that nothing of them stays in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, torch.Tensor] = {}  # kept alive, so that an id means one tensor

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _AT_ZERO and len(args) == 2 and id(args[0]) in self._drawn and _is_not_above_zero(args[1]):
            return _AT_ZERO[name]
        if name not in _AT_ZERO and name != "__get__":
            for value in (*args, *(kwargs or {}).values()):
                self._drawn.pop(id(value), None)  # may be written to, there or through another name
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(result, torch.Tensor) and result.ndim == 0:
            self._drawn[id(result)] = result
        return result


def _is_not_above_zero(bound: Any) -> bool:
    return isinstance(bound, int | float) and bound <= 0
