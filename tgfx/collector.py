"""Python's cyclic garbage collector, kept from going through everything that lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 1_000_000


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Young objects are collected as ever; full collections wait.

    A graph of a thousand nodes is enough new objects to start several of them, each of which goes through all objects
    of torch and of the user: up to a third of the time of `transform`.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
