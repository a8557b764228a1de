"""Fresh identities for the parameters and buffers of a model (a helper of `channels`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from tgfx.ir.facts import TAPS, Axis, TensorIds
from tgfx.ir.ids import IdSpace
from tgfx.ir.tree import named_buffers, named_parameters
from tgfx.passes.recorder import Entry


@dataclass(frozen=True)
class OwnTensors:
    """Identities by name, and by id() of the tensor; a tensor with two names has one set of them."""

    params: dict[str, TensorIds] = field(default_factory=dict)
    buffers: dict[str, TensorIds] = field(default_factory=dict)
    entries: dict[int, Entry] = field(default_factory=dict)
    taps: dict[str, torch.Tensor] = field(default_factory=dict)  # see ChannelMap


def own_tensors(root: nn.Module, space: IdSpace, tapped: Iterable[str] = ()) -> OwnTensors:
    """One identity for each index of each axis, of those tensors that can hold channels.

    `tapped`: weights of convolutions whose taps are to have identities too.
    """
    own = OwnTensors()
    for kind, named, table in (
        ("param", named_parameters(root), own.params),
        ("buffer", named_buffers(root), own.buffers),
    ):
        for name, tensor in named:
            if id(tensor) in own.entries:  # tied
                table[name] = own.entries[id(tensor)][1]
                continue
            table[name] = _fresh(kind, name, tensor, space)
            own.entries[id(tensor)] = (tensor, table[name], ("param", name, 0))
    for name in tapped:
        shape = own.params[name].shape[1:]
        ids = space.fresh(math.prod(shape), Axis("param", name, TAPS))
        own.taps[name] = torch.from_numpy(ids).reshape(1, *shape)
    return own


def _fresh(kind: str, name: str, tensor: torch.Tensor, space: IdSpace) -> TensorIds:
    shape = tuple(tensor.shape)
    axes = [a for a, size in enumerate(shape) if size > 1] if tensor.is_floating_point() else []
    ids = torch.from_numpy(space.fresh_lines([shape[axis] for axis in axes], [Axis(kind, name, a) for a in axes]))
    layers, start = [], 0
    for axis in axes:
        line = ids[start : start + shape[axis]]
        layers.append(line.view([-1 if a == axis else 1 for a in range(len(shape))]))
        start += shape[axis]
    return TensorIds(shape, tuple(layers))
