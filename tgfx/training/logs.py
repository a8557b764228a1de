"""Logs of a run in a folder: metrics.csv and a TensorBoard event file."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

from tgfx.training.event_file import EventFile
from tgfx.training.history import History, Value
from tgfx.whole_file import whole_file

CSV = "metrics.csv"


class Logs:
    """Follows a History, row by row. A run that is resumed drops what the killed one logged after its checkpoint."""

    def __init__(self, folder: str | os.PathLike[str], history: History, *, step: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._history = history
        self._columns: list[str] = []
        self._rewrite()
        self._events = EventFile(self.folder, first_step=step + 1)

    def add(self, row: dict[str, Value]) -> None:
        """The newest row of the history."""
        if set(row) <= set(self._columns):
            with open(self.folder / CSV, "a", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        else:
            self._rewrite()  # a column more (the first validation)
        numbers = {name: float(v) for name, v in row.items() if name != "step" and not isinstance(v, str)}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._events.scalars(finite, int(row["step"]))

    def close(self) -> None:
        self._events.close()

    def _rewrite(self) -> None:
        self._columns = self._history.columns
        with whole_file(self.folder / CSV) as aside, open(aside, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._history.rows)
