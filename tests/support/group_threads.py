"""Threads of torch's process groups: a process that ends beside one may abort (see examples/distributed/ranks.py)."""

from __future__ import annotations

import os
from pathlib import Path


def assert_no_threads_of_the_group() -> None:
    names = [_name(thread) for thread in os.listdir("/proc/self/task")]
    assert not [name for name in names if "gloo" in name], f"threads of the group are still there: {names}"


def _name(thread: str) -> str:
    return Path("/proc/self/task", thread, "comm").read_text().strip()
