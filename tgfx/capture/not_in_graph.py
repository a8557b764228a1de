"""What Python does around a traced forward without leaving a node: noticed, so that it is not lost in silence.

    with torch.autocast(...):   self.step += 1   self.run = 0.9 * self.run + y   random.random()   OwnFunction.apply(x)

fx runs the forward once and writes down operators. The module whose forward does such a thing is kept as it is instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import fx, nn

from tgfx.ir.plain_attributes import changed_attribute, plain_attributes
from tgfx.ir.tree import named_modules

_DEVICES = ("cpu", "cuda")


class NotInGraphError(Exception):
    """fx followed the code, but the graph would do something else; `where`: the module that should stay as it is."""

    def __init__(self, reason: str, where: str | None = None) -> None:
        super().__init__(reason)
        self.where = where


class CannotRunError(NotInGraphError):
    """The graph itself does not run on the example: perhaps it is not what the model does."""


class Surroundings(NamedTuple):
    """The state of torch that operators depend on without having it as an argument."""

    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]


def surroundings() -> Surroundings:
    autocast = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)
    return Surroundings(torch.is_grad_enabled(), tuple(on if on[0] else (False, torch.float32) for on in autocast))


# -- random numbers -----------------------------------------------------------------------------------------------


def random_states() -> tuple[Any, Any, bytes]:
    """Of the generators that a forward can draw from while it is traced."""
    own = np.random.get_state()
    return random.getstate(), (own[0], own[1].tobytes(), *own[2:]), torch.get_rng_state().numpy().tobytes()


def drawn_from(before: tuple[Any, Any, bytes], after: tuple[Any, Any, bytes]) -> str | None:
    """Whose numbers were drawn in between."""
    names = ("Python's random", "numpy.random", "torch, outside of traced values")
    return next((name for name, a, b in zip(names, before, after, strict=True) if a != b), None)


# -- while fx traces ----------------------------------------------------------------------------------------------


@contextmanager
def python_watched(tracer: Any) -> Iterator[None]:
    """Notice where the forward binds tensors of the model anew, and where it brings its own backward."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "__setattr__", _setting(tracer)))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(_applying(tracer))))
        stack.enter_context(mock.patch.object(torch.autocast, "__enter__", _entering(tracer)))
        stack.enter_context(mock.patch.object(torch.autocast, "__exit__", _leaving(tracer)))
        yield


def _setting(tracer: Any) -> Any:
    plain = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        table = next((t for t in (module._buffers, module._parameters) if name in t), None)
        if table is None or not isinstance(value, fx.Proxy):
            plain(module, name, value)
        elif not tracer.is_own(value, table[name]):  # self.n += 1 is in the graph, and n stays the same tensor
            raise NotInGraphError(f"puts another tensor in the place of {name!r}")

    return set_attribute


def _applying(tracer: Any) -> Any:
    plain = torch.autograd.Function.__dict__["apply"].__func__

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, fx.Proxy) for arg in args) or tracer.is_computing:
            return plain(kind, *args, **kwargs)
        if issubclass(kind, torch_checkpoint.CheckpointFunction) or kind.__name__ == "CheckpointFunction":
            return args[0](*args[2:])
        raise NotInGraphError(f"has its own backward ({kind.__name__})")

    return apply


def _entering(tracer: Any) -> Any:
    plain = torch.autocast.__enter__

    def enter(region: torch.autocast) -> Any:
        tracer.autocast_regions.append(region)
        return plain(region)

    return enter


def _leaving(tracer: Any) -> Any:
    plain = torch.autocast.__exit__

    def leave(region: torch.autocast, *error: Any) -> Any:
        tracer.autocast_regions.remove(region)
        return plain(region, *error)

    return leave


@contextmanager
def state_watched(model: nn.Module) -> Iterator[None]:
    """Notice, over a whole capture, counters that move and random numbers that Python draws."""
    before = [(path, module, plain_attributes(module)) for path, module in named_modules(model)]
    states = random_states()
    yield
    for path, module, values in before:
        name = changed_attribute(module, values)
        if name is not None:
            raise NotInGraphError(f"changes its attribute {name!r} in every call", path)
    drawn = drawn_from((*states[:2], b""), (*random_states()[:2], b""))  # torch's own are in the graph
    if drawn is not None:
        raise NotInGraphError(f"draws from {drawn}", "")
