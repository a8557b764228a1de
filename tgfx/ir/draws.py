"""Two programs that draw random numbers, compared: with the same draws, or with none.

y + randn_like(y)    as many numbers in both programs: the same seed makes them equal
                     fewer where channels went: all draws are held still, randn = 0.6 everywhere
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_STILL = 0.6  # not dropped by `rand() < p` nor by `floor(keep + rand())`
_KEPT = ("bernoulli", "bernoulli_")  # masks of what stays
_FILLED = {
    "rand", "rand_like", "uniform", "uniform_", "randn", "randn_like", "normal", "normal_", "exponential",
    "exponential_", "log_normal", "log_normal_", "cauchy", "cauchy_",
}  # fmt: skip


@contextmanager
def same_draws() -> Iterator[None]:
    """The random numbers that come are the same each time; the generators are as before afterwards."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cuda):
        try:
            if cuda:
                torch.cuda.manual_seed_all(0)
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def generators() -> list[torch.Tensor]:
    """The state of the generators: another one when something has been drawn."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


class StillDraws(TorchDispatchMode):
    """Every random number is the same one, however many are drawn; dropout drops nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        schema = getattr(func, "_schema", None)
        name = schema.name.rpartition("::")[2] if schema is not None else ""
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (name in _KEPT or name in _FILLED):
            result.fill_(1 if name in _KEPT else _STILL)
        return result
