"""While a captured model is run for an analysis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tgfx.ir.source import Source


@contextmanager
def undisturbed(source: Source) -> Iterator[None]:
    """Operators are all visible while this is open, and buffers are as before afterwards."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    buffers = [(buffer, buffer.clone()) for buffer in source.module.buffers()]
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        with torch.no_grad():
            for buffer, before in buffers:  # a train-mode graph moves running statistics, and tells no version counter
                if not torch.equal(buffer, before):  # an expanded constant could not even be written to
                    buffer.copy_(before)
