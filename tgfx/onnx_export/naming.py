"""Names of what goes in and comes out: the parameters of forward, and the keys of a result with keys."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from tgfx.errors import InputError

OUTPUT = "output"


def bound_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Parameter of forward -> what the example gives for it, in the order of a call. `*args` stay one tuple."""
    try:
        signature = inspect.signature(forward)
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            "the example does not fit the model",
            expected=f"arguments of forward{inspect.signature(forward)}",
            found=str(error),
            fix="give example_inputs as one call's arguments: a tensor, a tuple, or a dict of keyword arguments",
        ) from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def named_outputs(result: Any) -> dict[str, Tensor]:
    """Every tensor of a result under a name: `output`, `output_1` ..., or the keys of dicts and dataclasses."""
    if isinstance(result, Tensor):
        return {OUTPUT: result}
    named: dict[str, Tensor] = {}
    for place, (path, tensor) in enumerate(_leaves(result, ())):
        anonymous = OUTPUT if place == 0 else f"{OUTPUT}_{place}"
        name = "_".join(path) if path and not path[0].isdigit() else anonymous
        while name in named:
            name += "_"
        named[name] = tensor
    return named


def left_out(result: Any, path: tuple[str, ...] = ()) -> list[str]:
    """What of a result is no tensor, and so not in a file: "n (3)"."""
    if result is None or isinstance(result, Tensor):
        return []
    found = [name for key, item in _items(result) for name in left_out(item, (*path, key))]
    if isinstance(result, bool | int | float | str):
        found.append(f"{'_'.join(path) or OUTPUT} ({result!r})")
    return found


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from _leaves(item, (*path, key))


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return [(str(place), item) for place, item in enumerate(value)]
    return []  # numbers, None: not part of an ONNX graph
