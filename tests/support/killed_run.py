"""A training run for tests that kill it: python -m tests.support.killed_run <folder> <seconds per batch> [<every>].

<every>: steps between compactions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import tgfx
from tests.support.training import loader, small_gated


class Slow:
    """A loader that takes its time, so that there is some to be killed in, and that draws random numbers itself."""

    def __init__(self, seconds: float) -> None:
        self.inner, self.seconds = loader(), seconds
        self.generator = self.inner.generator

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.inner:
            time.sleep(self.seconds)
            yield images + 0.01 * torch.randn_like(images), labels


def train(folder: Path, seconds: float = 0.0, **options: Any) -> tuple[tgfx.GatedModule, tgfx.FitResult]:
    torch.set_num_threads(1)
    gated = small_gated()
    given = {"epochs": 5, "accumulate": 2, "checkpoint_every": 2, "seed": 1, "lr": 0.05, "log_every": 3, **options}
    result = tgfx.fit(
        gated, Slow(seconds), F.cross_entropy, budget={"flops": 0.5}, checkpoint=folder / "last.pt", log=folder / "log",
        progress=False, **given,
    )  # fmt: skip
    return gated, result


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), compact_every=int(sys.argv[3]) if len(sys.argv) > 3 else None)
