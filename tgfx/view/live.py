"""A run to be watched: a folder with the page and a small JSON that is written anew as gates close.

index.html    the page, written once
live.json     {"stamp", "state", "total", "now", "history", "budget"}, replaced as a whole
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.training.history import History
from tgfx.view.data import now_data, page_data
from tgfx.view.files import write_whole
from tgfx.view.history import history_data
from tgfx.view.page import page
from tgfx.view.shapes import shapes_before
from tgfx.view.subject import subject_of

PAGE, STATE = "index.html", "live.json"
SOONEST = 0.5  # seconds between two states
POINTS = 240  # of a curve
SHARE = 0.05  # of the time may go into writing them


class Live:
    """Follows a gated model in training."""

    def __init__(self, folder: str | os.PathLike[str], gated: GatedModule, history: History, total: int) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError("live is not a folder", expected="a folder", found=str(error)) from error
        self._history, self._total, self._gated = history, total, gated
        self._due = 0.0
        self._stamp = 0
        self._subject = subject_of(gated)
        self._shapes = shapes_before(self._subject)
        (self.folder / STATE).unlink(missing_ok=True)  # of an earlier run
        write_whole(self.folder / PAGE, page(page_data(gated, history=history, live=True)))

    def update(self, step: int, state: str = "running") -> None:
        """Write the state, if it is time for one; always at the end."""
        begun = time.perf_counter()
        if state == "running" and begun < self._due:
            return
        self._stamp += 1
        written: dict[str, Any] = {
            "stamp": f"{os.getpid()}.{self._stamp}",
            "state": state,
            "total": self._total,
            "now": now_data(self._subject, self._shapes, step),
            "history": history_data(self._history, POINTS),
            "budget": dict(self._gated.controller.budget) if self._gated.controller is not None else None,
        }
        write_whole(self.folder / STATE, json.dumps(written, allow_nan=False, separators=(",", ":")))
        spent = time.perf_counter() - begun
        self._due = begun + max(SOONEST, spent / SHARE)
