"""What a compaction did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompactionReport:
    """removed: group -> channels removed now; waiting: closed channels that may still reopen.

    left: group -> (channels left, channels of the model that was transformed); parameters: numbers of weights before
    and after, gates not counted; gone: names of parameters that left with whole branches; reset: names of parameters
    whose optimizer state could not be cut and starts anew.
    """

    removed: dict[str, int]
    waiting: int
    left: dict[str, tuple[int, int]]
    parameters: tuple[int, int]
    gone: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything was removed."""
        return bool(self.removed)

    def __str__(self) -> str:
        now, whole = (sum(sizes) for sizes in zip(*self.left.values(), strict=True))
        before, after = self.parameters
        text = f"removed {sum(self.removed.values())} channels of {len(self.removed)} groups"
        text += f"; {now} of {whole} left, {self.waiting} of them closed and waiting"
        text += f"; parameters {before:,} -> {after:,}"
        if self.gone:
            text += f"; {len(self.gone)} parameters left with their branches"
        return text
