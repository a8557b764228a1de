"""Milliseconds in ONNX Runtime, models taking turns so that a busy machine is busy for all."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tgfx.onnx_export.session import Feeds, open_session, run

SECONDS = 0.5  # for each number of threads
WARM_UP, LEAST, MOST = 3, 7, 100


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one call. original: of the model before the cut, where there is one."""

    threads: int
    compact: float
    original: float | None = None

    @property
    def speedup(self) -> float | None:
        return None if self.original is None else self.original / self.compact


def alternating(calls: Sequence[Callable[[], Any]], seconds: float = SECONDS) -> list[float]:
    """Median milliseconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    for turn in range(WARM_UP + MOST):
        if turn >= WARM_UP + LEAST and time.perf_counter() - start > seconds:
            break
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if turn >= WARM_UP:
                own.append(1000 * (time.perf_counter() - began))
    return [statistics.median(own) for own in times]


def timings(compact: Any, original: Any | None, feeds: Feeds) -> list[Timing]:
    """One thread, and all cores where there are several. Models: paths or in memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    taken = []
    for threads in sorted({1, cores}):
        models = [compact] if original is None else [compact, original]
        sessions = [open_session(model, threads=threads) for model in models]
        medians = alternating([lambda own=own: run(own, feeds) for own in sessions])  # type: ignore[misc]
        taken.append(Timing(threads, medians[0], medians[1] if original is not None else None))
    return taken
