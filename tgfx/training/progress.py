"""What a run shows while it goes: a live display in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from tgfx.training.history import Value

LINES = 20  # plain lines in a run, about
QUICK = 0.1  # seconds between two updates of the live display


class Display(Protocol):
    def __enter__(self) -> Display: ...
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def wants(self, step: int) -> bool:
        """Whether it is time for another row."""

    def show(self, row: Mapping[str, Value]) -> None: ...


def display(progress: bool | Console, total: int, start: int, channels: int) -> Display:
    """`channels`: how many gates there are."""
    if progress is False:
        return Silent()
    console = progress if isinstance(progress, Console) else Console(stderr=True)
    return LiveDisplay(console, total, start, channels) if console.is_terminal else Plain(console, total, channels)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wants(self, step: int) -> bool:
        return False

    def show(self, row: Mapping[str, Value]) -> None:
        return None


class Plain(Silent):
    """A line at every few percent."""

    def __init__(self, console: Console, total: int, channels: int) -> None:
        self._console, self._total, self._channels = console, total, channels
        self._every = max(1, total // LINES)
        self._start: tuple[float, int] | None = None

    def wants(self, step: int) -> bool:
        if self._start is None:
            self._start = (time.perf_counter(), step)
        return step % self._every == 0 or step == self._total

    def show(self, row: Mapping[str, Value]) -> None:
        step = int(row["step"])
        parts = [f"step {step}/{self._total}", *summary(row, self._channels), f"left {self._left(step)}"]
        self._console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        began, first = self._start or (time.perf_counter(), step)
        if step <= first:
            return "?"
        left = round((time.perf_counter() - began) / (step - first) * (self._total - step))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"


class LiveDisplay:
    """A bar with the time left, and two lines below it that are written over."""

    def __init__(self, console: Console, total: int, start: int, channels: int) -> None:
        self._channels = channels
        columns = (TextColumn("fit"), BarColumn(), MofNCompleteColumn(), TextColumn("elapsed"), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", total=total, completed=start)
        self._lines = Text("")
        self._live = Live(Group(self._bar, self._lines), console=console, refresh_per_second=4)
        self._shown = 0.0

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def wants(self, step: int) -> bool:
        last = step == self._bar.tasks[0].total
        return last or time.perf_counter() - self._shown >= QUICK

    def show(self, row: Mapping[str, Value]) -> None:
        self._shown = time.perf_counter()
        self._bar.update(self._task, completed=int(row["step"]))
        parts = summary(row, self._channels)
        self._lines.plain = "  ".join(parts[:2]) + "\n" + "  ".join(parts[2:])


def summary(row: Mapping[str, Value], channels: int) -> list[str]:
    """Loss, phase, ratios with their targets, open channels, validation."""
    parts = [f"loss {row['loss']:.4g}", f"epoch {row['epoch']}, {row['phase']}"]
    for name, value in row.items():
        if name.startswith("ratio_"):
            kind = name.removeprefix("ratio_")
            target = row.get(f"target_{kind}")
            parts.append(f"{kind} {value:.3f}" + (f" (target {target:.3f})" if target is not None else ""))
    parts.append(f"open channels {row['open']}/{channels}")
    return parts + [f"{name} {value:.4g}" for name, value in row.items() if name.startswith("val_")]
