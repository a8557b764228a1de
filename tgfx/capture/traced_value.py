"""What stands for a value of the model while fx traces it."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import fx

from tgfx.capture.asking import asks_for_attribute, is_message, is_of_torch, is_question
from tgfx.capture.not_in_graph import NotInGraphError


class InPlaceProxy(fx.Proxy):
    """`x += y` stays in place: plain fx makes it `x = x + y`, which is slower, and wrong if x has another name."""

    def _in_place(self, function: Callable, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Written as a change of a view, which passes know how to cut, and which fx can load again."""
        if not all(map(_makes_a_view, index if isinstance(index, tuple) else (index,))):
            raise fx.proxy.TraceError("the model writes to places that a tensor tells")
        view = self[index]
        if isinstance(value, bool | int | float):
            view.fill_(value)
        else:
            view.copy_(value)

    def __ceil__(self) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", math.ceil, (self,), {})

    def __floor__(self) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", math.floor, (self,), {})

    def __round__(self, digits: int | None = None) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", round, (self, digits), {})

    def __len__(self) -> int:
        return self.tracer.to_length(self)  # type: ignore[attr-defined]

    # -- what lets a size into the model's own code without a node of the graph ---------------------------------------

    def __eq__(self, other: Any) -> Any:
        """Where the model keeps a value in a table, later calls must not take it for one of theirs."""
        if self._is_over or (isinstance(other, fx.Proxy) and other.tracer is not self.tracer):
            return self is other
        return self.tracer.create_proxy("call_function", operator.eq, (self, other), {})

    def __hash__(self) -> int:
        if self._is_over or not is_question(sys._getframe(1)):
            return object.__hash__(self)
        is_plain, value = self.tracer.to_hashed(self)  # type: ignore[attr-defined]
        return hash(value) if is_plain else object.__hash__(self)

    def __repr__(self) -> str:
        return repr(self._printed(sys._getframe(1)))

    def __str__(self) -> str:
        return str(self._printed(sys._getframe(1)))

    def __format__(self, form: str) -> str:
        value = self._printed(sys._getframe(1))
        return str(value) if isinstance(value, _Name) else format(value, form)

    def _printed(self, frame: FrameType) -> Any:
        """The value itself where the model asks for it; else a name, as fx prints it."""
        if self._is_over or not is_question(frame) or is_message(frame):
            return _Name(fx.Proxy.__repr__(self))
        return self.tracer.to_printed(self)  # type: ignore[attr-defined]

    @property
    def _is_over(self) -> bool:
        return getattr(self.tracer, "has_ended", True)

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        if not (name.startswith("__") or self._is_over):
            frame = sys._getframe(1)
            asked = is_question(frame) and not is_of_torch(frame) and asks_for_attribute(frame)
            if self.tracer.lacks(self, name, asked=asked):  # type: ignore[attr-defined]
                raise AttributeError(name)
        return InPlaceAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer") and hasattr(torch.Tensor, name):
            raise NotInGraphError(f"assigns to .{name} of a tensor")
        super().__setattr__(name, value)


class InPlaceAttribute(fx.proxy.Attribute, InPlaceProxy):
    """`x.shape` and its like: asked the same way as the values that they are made from."""


class _Name(str):
    """What stands for a traced value in a message."""

    def __repr__(self) -> str:
        return str(self)


def _makes_a_view(index: Any) -> bool:
    """Whether x[index] shares memory with x; a traced bound of a slice is a size."""
    plain = index is None or index is ... or isinstance(index, slice)
    return plain or (isinstance(index, int) and not isinstance(index, bool))
