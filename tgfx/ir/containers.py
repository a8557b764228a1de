"""Values that models hand out in other classes: Hugging Face's outputs, dataclasses, named tuples, ordered dicts.

    return CausalLMOutput(logits=x)  ->  a graph node that calls CausalLMOutput(logits=x)

fx writes a subclass of dict down as a plain dict. As a call of its class the value keeps its type, and `is_wrapped`
lets the call survive pickling, which for torch means tracing the graph's code anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict


class Building(NamedTuple):
    """kind(*args, **kwargs) gives the value again."""

    kind: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CannotBuildError(Exception):
    """A value that its class does not make again from what it holds."""


def is_container_type(kind: Any) -> bool:
    """Whether a class holds values by name, without being one that fx writes down itself."""
    if not isinstance(kind, type) or issubclass(kind, torch.Tensor | fx.Node | fx.Proxy | nn.Module):
        return False
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    named = issubclass(kind, dict) and kind not in (dict, immutable_dict)
    return named_tuple or named or is_dataclass(kind)


def builds_container(node: fx.Node) -> bool:
    """Whether a node does nothing but put such a value together."""
    return node.op == "call_function" and is_container_type(node.target)


def building(value: Any) -> Building:
    """How to make `value` again, seen to give the very same parts."""
    kind = type(value)
    if issubclass(kind, tuple):
        way = Building(kind, tuple(value), {})
    elif is_dataclass(kind):
        way = Building(kind, (), {field.name: getattr(value, field.name) for field in fields(kind) if field.init})
    else:
        way = Building(kind, (list(value.items()),), {})
    try:
        again = kind(*way.args, **way.kwargs)
    except Exception as error:
        raise CannotBuildError(f"{kind.__name__} cannot be made from what it holds: {error}") from error
    mine, other = parts(value), parts(again)
    if list(mine) != list(other) or any(mine[key] is not other[key] for key in mine):
        raise CannotBuildError(f"{kind.__name__} changes what it is made from")
    return way


def parts(value: Any) -> dict[Any, Any]:
    """What a container holds, by name: as a mapping, and as attributes."""
    if isinstance(value, tuple):
        return dict(enumerate(value))
    held: dict[Any, Any] = dict(value.items()) if isinstance(value, Mapping) else {}
    if is_dataclass(value):
        held.update((("field", field.name), getattr(value, field.name)) for field in fields(value))
    return held
