"""What a gate decides on: channels, connections to a residual sum, taps, heads, residual branches, weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tgfx.errors import GranularityError

KNOWN = ("channel", "connection", "tap", "head", "layer", "weight")
_ALONE = "weight"  # a mask over single weights leaves no structure that could be removed along with it


def parse(granularity: Any) -> frozenset[str]:
    """One name or several, e.g. "channel" or ("channel", "layer"), as a set."""
    names = [granularity] if isinstance(granularity, str) else _listed(granularity)
    expected = ", ".join(f'"{name}"' for name in KNOWN) + "; several in a tuple"
    if not names or any(name not in KNOWN for name in names):
        raise GranularityError(f"unknown granularity {granularity!r}", expected=expected, found=repr(granularity))
    if _ALONE in names and len(set(names)) > 1:
        raise GranularityError(
            f"granularity {_ALONE!r} cannot be mixed with others", expected=f'"{_ALONE}" alone', found=repr(granularity)
        )
    return frozenset(names) | ({"channel"} if {"connection", "tap"} & set(names) else set())


def _listed(granularity: Any) -> list[str]:
    if not isinstance(granularity, Iterable):
        return []
    names = list(granularity)
    return names if all(isinstance(name, str) for name in names) else []
