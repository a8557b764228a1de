"""The processes of one training know each other for as long as a block lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# First imported by DDP, its functions would take the group of that time as a default, and hold it for good.
import torch.distributed.nn  # noqa: F401
from torch import distributed


@contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """Let the block call a function that makes model and optimizer, so that nobody holds them when it ends.

    A group's threads let go of the tensors that they exchanged a moment after the step is done, and need the
    interpreter for it. If it is just ending, the process aborts ("terminate called without an active exception").
    They are joined when the group goes, which a wrapped model holds, and wrapped models are in reference cycles.
    """
    distributed.init_process_group(backend)
    try:
        yield
    finally:
        gc.collect()
        distributed.destroy_process_group()
