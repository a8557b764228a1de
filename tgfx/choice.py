"""One of several layers, chosen by gradient descent while they train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tgfx.choice_gate import ChoiceGate
from tgfx.errors import InputError
from tgfx.gates import GateSpec

__all__ = ["Choice", "alternative", "spelled_out"]

_SPELLED_OUT: ContextVar[bool] = ContextVar("tgfx_choices_spelled_out", default=False)


@torch.library.custom_op("tgfx::alternative", mutates_args=())
def alternative(value: Tensor, choice: int, index: int) -> Tensor:
    """Marks, in a graph that is being captured, the value of one alternative of one choice."""
    return value.clone()


@alternative.register_fake
def _(value: Tensor, choice: int, index: int) -> Tensor:
    return torch.empty_like(value)


@contextmanager
def spelled_out() -> Iterator[None]:
    """While this is open, numbered choices are the plain sum of their alternatives, each marked."""
    token = _SPELLED_OUT.set(True)
    try:
        yield
    finally:
        _SPELLED_OUT.reset(token)


class Choice(nn.Module):
    """Layers that take the same arguments and give tensors of one shape; one of them will stay.

        nn.Sequential(stem, tgfx.Choice([nn.Conv2d(8, 8, 3, padding=1), nn.Identity()]), head)

    In training mode all run, and are added up with the values of an n-ary gate (see ChoiceGate): one counts in full,
    the others for next to nothing, yet each weight is told how much better the loss would be with more of its layer.
    In eval mode only the chosen one runs. Works in any training loop; after `tgfx.transform` the price of each
    alternative is part of `cost`, and `tgfx.shrink` keeps the chosen one alone.

    gate: M, shape and first weights of the gate. init: the alternative chosen at first (its weight starts at
    `gate.init_value`, the others at 0), or all n first weights; left out, all start equal and the first is chosen.
    """

    def __init__(
        self,
        alternatives: Iterable[nn.Module],
        *,
        gate: GateSpec | None = None,
        init: int | Tensor | None = None,
    ) -> None:
        super().__init__()
        layers = list(alternatives) if isinstance(alternatives, Iterable) else []
        if len(layers) < 2 or not all(isinstance(layer, nn.Module) for layer in layers):
            raise InputError("a choice needs layers", expected="two modules or more", found=repr(alternatives))
        if gate is not None and not isinstance(gate, GateSpec):
            raise InputError("gate cannot be used", expected="a tgfx.GateSpec", found=repr(gate))
        self.alternatives = nn.ModuleList(layers)
        self.gate = ChoiceGate(len(layers), _starting_at(gate or GateSpec(), init, len(layers)))
        self.number: int | None = None  # set on the copy that tgfx.transform captures

    def selected(self) -> int:
        """Index of the alternative that eval mode runs and shrink keeps."""
        return self.gate.chosen()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.number is not None and _SPELLED_OUT.get():
            results = [one(*args, **kwargs) for one in self.alternatives]
            if all(type(result) is Tensor for result in results):  # run for real, not traced
                check_alike(results)
            return reduce(torch.add, [alternative(result, self.number, i) for i, result in enumerate(results)])
        if not self.training:
            return self.alternatives[self.selected()](*args, **kwargs)
        values = self.gate()
        results = [one(*args, **kwargs) for one in self.alternatives]
        check_alike(results)
        return reduce(torch.add, [result * value for result, value in zip(results, values, strict=True)])


def check_alike(results: list[Any]) -> None:
    """Alternatives are added up: a shape that is merely broadcast would be another layer."""
    shapes = [tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__ for result in results]
    if any(shape != shapes[0] for shape in shapes) or not isinstance(results[0], Tensor):
        raise InputError(
            "the alternatives of a choice do not fit together",
            expected="tensors of one shape",
            found=", ".join(map(str, shapes)),
        )


def _starting_at(spec: GateSpec, init: Any, size: int) -> GateSpec:
    if init is None:
        return spec
    if isinstance(init, int) and not isinstance(init, bool) and 0 <= init < size:
        value = abs(spec.init_value) or 1.0
        return replace(spec, init=_one_ahead(init, value))
    if isinstance(init, Tensor):
        return replace(spec, init=_fixed(init))
    expected = f"an index from 0 to {size - 1}, or a tensor of {size} weights"
    raise InputError("init cannot be used", expected=expected, found=repr(init))


def _one_ahead(index: int, value: float) -> Callable[[int], Tensor]:
    return lambda size: torch.where(torch.arange(size) == index, value, 0.0)


def _fixed(weights: Tensor) -> Callable[[int], Tensor]:
    return lambda size: weights
