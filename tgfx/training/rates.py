"""Learning rates over a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from tgfx.errors import InputError

Scheduler = str | LRScheduler | Callable[[Optimizer], LRScheduler] | None


def scheduler_of(given: Scheduler, optimizer: Optimizer, total: int) -> LRScheduler | None:
    """The scheduler itself: "cosine" falls to 0 over all steps, None keeps the rates, a function makes one."""
    if given is None:
        return None
    if given == "cosine":
        return LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / total))))
    made: Any = given(optimizer) if callable(given) and not isinstance(given, LRScheduler) else given
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise InputError(
            "this scheduler cannot be stepped once per optimizer step",
            expected='"cosine", None, a torch LRScheduler, or a function from optimizer to one',
            found=type(made).__name__ if not isinstance(made, str) else repr(made),
        )
    if made.optimizer is not optimizer:
        raise InputError(
            "the scheduler belongs to another optimizer",
            expected="the optimizer that is passed along",
            found=f"another {type(made.optimizer).__name__}",
            fix="pass scheduler=lambda optimizer: ...",
        )
    return made
