"""What a benchmark hands over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`conclusion` is one sentence with the figure that counts and its target."""

    title: str
    how: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    conclusion: str

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.how, "", f"**{self.conclusion}**", ""]
        lines.append("| " + " | ".join(self.headers) + " |")
        lines.append("|---|" + "---:|" * (len(self.headers) - 1))
        lines.extend("| " + " | ".join(row) + " |" for row in self.rows)
        return "\n".join(lines) + "\n"


def cpu_seconds(call: Callable[[], object]) -> float:
    """Processor time, which does not count the time that other jobs take. Benchmarks run on one thread."""
    start = time.process_time()
    call()
    return time.process_time() - start


def met(reached: bool) -> str:
    return "met" if reached else "NOT met"


def few_holes(smallest: int = 1_000_000) -> dict[str, str]:
    """An environment in which freed tensors go back to the system: peak memory is then what was in use at once.

    `smallest`: in bytes; smaller ones are kept for later by the C library, whether or not they are asked for again.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(smallest)}
