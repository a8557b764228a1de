"""Which rule answers for which ATen operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from tgfx.ir.facts import TensorIds
from tgfx.ir.layer_shape import LayerShape
from tgfx.ir.source import tensors_in


class Recorder(Protocol):
    """What a rule may ask of, and tell, the analysis that runs it."""

    @property
    def head_first(self) -> bool: ...
    def ids(self, tensor: torch.Tensor) -> TensorIds: ...
    def taps(self, weight: torch.Tensor) -> torch.Tensor | None: ...
    def give(self, tensor: torch.Tensor, layers: Any, like: torch.Tensor | None = None) -> None: ...
    def unite(self, a: torch.Tensor, b: torch.Tensor, *, quiet: bool = False) -> None: ...
    def freeze(self, layer: torch.Tensor, reason: str, *, limit: bool = False) -> None: ...
    def freeze_all(self, tensor: torch.Tensor, reason: str, *, limit: bool = False) -> None: ...
    def fresh(self, size: int, kind: str, axis: int) -> torch.Tensor: ...
    def vector(self, tensor: torch.Tensor, axis: int) -> torch.Tensor: ...
    def line(self, layer: torch.Tensor, keep: int) -> torch.Tensor: ...
    def distinct(self, layer: torch.Tensor, axis: int) -> int: ...
    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool: ...
    def read(self, kind: str, layer: torch.Tensor, operands: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None: ...
    def work(self, factor: int, axes: list[tuple[torch.Tensor, int] | torch.Tensor], counted: bool) -> None: ...
    def layer(
        self,
        shape: LayerShape,
        ins: torch.Tensor,
        outs: torch.Tensor,
        rows: tuple[torch.Tensor, int] | None = None,
    ) -> None: ...
    def out_channels(self, weight: torch.Tensor, channels: torch.Tensor) -> None: ...
    def grouping(self, mode: str) -> None: ...
    def one_head(self, layer: torch.Tensor, axis: int) -> None: ...
    def is_broadcast(self, layer: torch.Tensor) -> bool: ...
    def heads(self, layers: list[torch.Tensor]) -> None: ...
    def sized(self, tensors: list[torch.Tensor]) -> None: ...
    def is_written_later(self) -> bool: ...


@dataclass(frozen=True)
class Call:
    """One ATen call, already executed."""

    rec: Recorder
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)

    def tensors(self) -> list[torch.Tensor]:
        return self._operands

    def outputs(self) -> list[torch.Tensor]:
        return self._results

    @cached_property
    def _operands(self) -> list[torch.Tensor]:
        return _flat_tensors((*self.args, *self.kwargs.values()))

    @cached_property
    def _results(self) -> list[torch.Tensor]:
        return tensors_in(self.out)


def _flat_tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The operands of an ATen call are tensors, numbers and lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


Rule = Callable[[Call], None]
_RULES: dict[str, Rule] = {}


def register(*names: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of these ATen operators (names without the in-place mark)."""

    def keep(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise AssertionError(f"two rules for aten::{name}")
            _RULES[name] = rule
        return rule

    return keep


def rule_for(name: str) -> Rule | None:
    return _RULES.get(name)
