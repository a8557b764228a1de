"""What a gate may decide on: channels, attention heads, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tgfx.errors import GranularityError

NAMES = ("channel", "layer", "head", "weight")
AVAILABLE = ("channel", "head")


def parse(granularity: Any) -> frozenset[str]:
    """The names in `granularity`: one of them or several, e.g. "head" or ("channel", "head")."""
    several = not isinstance(granularity, str) and isinstance(granularity, Iterable)
    wanted = list(granularity) if several else [granularity]
    expected = "one or several of " + ", ".join(f'"{name}"' for name in AVAILABLE)
    for name in wanted:
        if not isinstance(name, str) or name not in NAMES:
            raise GranularityError(f"granularity {name!r} is not known", expected=expected, found=repr(granularity))
        if name not in AVAILABLE:
            raise GranularityError(f"granularity {name!r} is not available", expected=expected, found=repr(granularity))
    if not wanted:
        raise GranularityError("granularity names nothing", expected=expected, found=repr(granularity))
    return frozenset(wanted)


__all__ = ["parse"]
