"""Buffers that a run of a model moves: running statistics, caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_restored(module: nn.Module) -> Iterator[None]:
    """Whatever happens inside, buffers are as before afterwards.

    Values are compared, since batch norm moves its statistics without telling the version counter; and only what
    changed is written back, since an expanded constant cannot be written to.
    """
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before and not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])
