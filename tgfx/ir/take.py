"""A part of a tensor: some positions of some axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Positions = Sequence[np.ndarray | None]  # per axis; None: all of it


def take(tensor: Tensor, positions: Positions) -> Tensor:
    """New memory, in the memory format of `tensor`."""
    smaller = tensor.detach()
    for axis, kept in enumerate(positions):
        if kept is not None:
            smaller = smaller.index_select(axis, torch.from_numpy(kept).to(smaller.device))
    if tensor.layout is not torch.strided:  # the sparse gradient of an embedding
        return smaller.clone()
    for ndim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.ndim == ndim and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return smaller.clone(memory_format=layout)
    return smaller.clone()


def cuts_anything(positions: Positions) -> bool:
    return any(kept is not None for kept in positions)
