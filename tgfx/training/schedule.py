"""When to do what: watch, close, settle, hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tgfx.errors import InputError

Phase = Literal["watch", "close", "settle", "hold"]


@dataclass(frozen=True)
class Schedule:
    """Shares of `steps`.

    Until `watch` the gates only gather evidence; until `close` the target falls to the budget; until `hold`
    gates may still change places at the budget; after that they stand still and the weights settle.
    """

    steps: int
    watch: float = 0.02
    close: float = 0.4  # early: the weights then have half of the steps to make up for what went
    hold: float = 0.5

    @staticmethod
    def for_gates(steps: int) -> Schedule:
        """Where the weights stay as they are there is nothing to settle: gates change places almost to the end."""
        return Schedule(steps, close=0.6, hold=0.95)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise InputError(
                "training needs a number of steps", expected="a whole number, at least 1", found=repr(self.steps)
            )
        if not 0 <= self.watch <= self.close <= self.hold <= 1:
            found = f"watch={self.watch}, close={self.close}, hold={self.hold}"
            raise InputError("the schedule is out of order", expected="0 <= watch <= close <= hold <= 1", found=found)

    def phase(self, step: int) -> Phase:
        """`step`: optimizer steps taken so far."""
        if step >= self.hold * self.steps:
            return "hold"
        if step >= self.close * self.steps:
            return "settle"
        return "close" if step >= self.watch * self.steps else "watch"

    def target(self, step: int, share: float, first: float = 1.0) -> float:
        """From `first` down to `share`: fast at first, while much is redundant, and slowly towards the end."""
        start, end = self.watch * self.steps, self.close * self.steps
        if step >= end:
            return share
        done = max(0.0, step - start) / (end - start)
        return share + max(0.0, first - share) * (1 - done) ** 2
