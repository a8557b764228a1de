"""While a captured model is run for an analysis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tgfx.ir.buffers import buffers_restored
from tgfx.ir.source import Source


@contextmanager
def undisturbed(source: Source) -> Iterator[None]:
    """Operators are all visible while this is open, and buffers are as before afterwards."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with buffers_restored(source.module), torch.no_grad():  # a train-mode graph moves running statistics
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
