"""Ctrl-C as a wish: the step at hand is finished first. A second Ctrl-C interrupts at once, as usual."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While entered, the first SIGINT only sets `wanted`."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None
        self._ours = False

    def __enter__(self) -> Interrupt:
        # signals reach the main thread only, and a program that handles or ignores them itself keeps doing so
        main = threading.current_thread() is threading.main_thread()
        self._ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._give_back()

    def _give_back(self) -> None:
        if self._ours:
            self._ours = False
            signal.signal(signal.SIGINT, self._before)
