"""Hooks that do not keep their owner alive."""

from __future__ import annotations

import weakref
from typing import Any


def weakly(controller: Any, method: str) -> Any:
    """A hook that calls a controller's method as long as the controller and its gated model are there.

    Hooks live as long as the process or the model do.
    """
    own = weakref.ref(controller)

    def hook(*args: Any) -> None:
        alive = own()
        if alive is not None and alive._gated() is not None:
            getattr(alive, method)(*args)

    return hook
