"""Numbers and texts that modules hold as attributes, which a forward may count in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tgfx.ir.tree import named_modules

_PLAIN = (bool, int, float, complex, str)
_MOST = 64  # entries of a list or table that is looked at


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, texts, and lists and tables of such: what a forward counts in."""
    return {name: _copied(value) for name, value in module.__dict__.items() if _is_plain(value)}


def changed_attribute(module: nn.Module, before: dict[str, Any]) -> str | None:
    """The first of them that has another plain value now (what was traced into it is another matter)."""
    for name, value in before.items():
        now = module.__dict__.get(name, value)
        if now is not value and _is_plain(now) and (type(now) is not type(value) or now != value):
            return name
    return None


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple, set):
        return len(value) <= _MOST and all(type(item) in _PLAIN for item in value)
    return type(value) is dict and 0 < len(value) <= _MOST and all(type(item) in _PLAIN for item in value.values())


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, set, dict) else value


@contextmanager
def plain_attributes_restored(model: nn.Module) -> Iterator[None]:
    """A trial run counts for nothing."""
    before = [(module, plain_attributes(module)) for _, module in named_modules(model)]
    try:
        yield
    finally:
        for module, values in before:
            while (name := changed_attribute(module, values)) is not None:
                module.__dict__[name] = values[name]
