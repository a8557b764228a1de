"""What happened in a run: a row every few steps, and the sizes of all groups whenever they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Value = float | int | str


class History:
    """Rows of named values. `kept` holds (step, open gates of each of `groups`), written only where it changed."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        self.groups = tuple(groups)
        self.rows: list[dict[str, Value]] = []
        self.kept: list[tuple[int, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        """Every name that occurs, in the order of its first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def column(self, name: str) -> list[Value]:
        """The values of one column, from the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def add(self, row: Mapping[str, Value], counts: Sequence[int]) -> None:
        self.rows.append(dict(row))
        if not self.kept or self.kept[-1][1] != tuple(counts):
            self.kept.append((int(row["step"]), tuple(counts)))

    def kept_at(self, step: int) -> dict[str, int]:
        """Open gates of each group as they were at a step (that of the last row until then)."""
        known = [counts for at, counts in self.kept if at <= step]
        return dict(zip(self.groups, known[-1], strict=True)) if known else {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": list(self.groups),
            "rows": [dict(row) for row in self.rows],
            "kept": [[step, list(counts)] for step, counts in self.kept],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = tuple(state["groups"])
        self.rows = [dict(row) for row in state["rows"]]
        self.kept = [(step, tuple(counts)) for step, counts in state["kept"]]
