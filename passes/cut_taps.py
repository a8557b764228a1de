"""Part of the cut: convolutions that have lost some of their taps.

    y = conv(x)    ->    y = conv(x.index_select(1, kept_0))                  whole channels are not read any more
    y = conv(x)    ->    p = pad(x)                                           else: one slice for each place of the
                         y = conv_1x1(cat([p[:, :, 0::s].index_select(1, kept_0), p[:, :, 1::s], ...], 1))    window

A window with holes is no convolution that torch has. Seen place by place it is one: every place of the window reads a
shifted slice of the input, some channels of it, and the filters mix all that is read, as in a convolution of size 1.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tgfx.passes.kept_positions import KeptPositions


@dataclass(frozen=True)
class TapCut:
    """What is left of the taps of one layer: `alive` [channels, *window], of the channels that are left."""

    alive: np.ndarray

    @staticmethod
    def of(weight: str, positions: KeptPositions) -> TapCut | None:
        """None where all taps live of all channels that do."""
        alive = positions.survivors.alive_of_id[positions.channels.taps[weight].numpy()[0]]
        channels = positions.survivors.kept(positions.channels.params[weight])[1]
        alive = alive if channels is None else alive[channels]
        return None if alive.all() else TapCut(alive)

    @property
    def read(self) -> list[int]:
        """Channels of which anything is read."""
        return np.flatnonzero(self.alive.reshape(len(self.alive), -1).any(axis=1)).tolist()

    @property
    def has_holes(self) -> bool:
        """Whether of some channel a part of the window is read: else they are channels that go or stay."""
        return not self.alive[self.read].all()

    def pieces(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """(place in the window, channels that are read there), without places where nothing is."""
        window = self.alive.shape[1:]
        places = itertools.product(*(range(size) for size in window))
        found = [(place, np.flatnonzero(self.alive[(slice(None), *place)]).tolist()) for place in places]
        return [(place, channels) for place, channels in found if channels]

    # -- the layer ------------------------------------------------------------------------------------------------

    def weight(self, weight: Tensor) -> Tensor:
        """What is left of a weight [out, channels, *window] that has the channels already."""
        if not self.has_holes:
            return weight[:, self.read].detach().clone()
        parts = [weight[(slice(None), channels, *place)].detach() for place, channels in self.pieces()]
        joined = torch.cat(parts, dim=1)
        return joined.reshape(*joined.shape, *[1] * (weight.ndim - 2))

    def resize_(self, layer: nn.Module) -> None:
        """Bring a layer that holds this weight to what it reads now: a window of one entry, where there are holes."""
        if self.has_holes:
            space = self.alive.ndim - 1
            layer.kernel_size = layer.stride = layer.dilation = (1,) * space
            layer.padding = (0,) * space
            layer._reversed_padding_repeated_twice = [0, 0] * space


@dataclass(frozen=True)
class TapReader:
    """Writes into `graph` what a layer without some of its taps reads. `module`: the layer as it was.

    axis: that of the channels, which is the first where the model runs without a batch.
    """

    graph: fx.Graph
    module: nn.Module
    axis: int
    constant: Callable[[list[int]], fx.Node]

    def read(self, x: fx.Node, taps: TapCut) -> fx.Node:
        size = len(taps.alive)
        if not taps.has_holes:
            return self._select(x, taps.read, size)
        padded = self._padded(x)
        parts = [self._select(self._shifted(padded, place), channels, size) for place, channels in taps.pieces()]
        return parts[0] if len(parts) == 1 else self.graph.call_function(torch.cat, (parts, self.axis))

    def nothing(self, x: fx.Node, width: int, bias: fx.Node | None) -> fx.Node:
        """What a layer gives that reads nothing: its bias, everywhere, in memory that may be written to."""
        first = self.graph.call_function(torch.narrow, (self._padded(x), self.axis, 0, 1))
        zeros = self.graph.call_function(torch.zeros_like, (self._shifted(first, (0,) * self.space),))
        sizes = [width if a == self.axis else -1 for a in range(self.axis + 1 + self.space)]
        wide = self.graph.call_method("expand", (zeros, *sizes))
        if bias is None:
            return self.graph.call_method("contiguous", (wide,))
        column = self.graph.call_method("reshape", (bias, -1, *[1] * self.space))
        return self.graph.call_function(operator.add, (wide, column))

    @property
    def window(self) -> tuple[int, ...]:
        return tuple(self.module.weight.shape[2:])  # type: ignore[union-attr, arg-type]

    @property
    def space(self) -> int:
        return len(self.window)

    def _per_axis(self, setting: Any) -> tuple[int, ...]:
        """A setting of the layer, which may have been set to one number for all axes."""
        return tuple(setting) if isinstance(setting, Sequence) else (setting,) * self.space

    def _select(self, x: fx.Node, channels: list[int], size: int) -> fx.Node:
        if channels == list(range(size)):
            return x
        return self.graph.call_function(torch.index_select, (x, self.axis, self.constant(channels)))

    def _padded(self, x: fx.Node) -> fx.Node:
        padding: list[int] = []
        for width in reversed(self._paddings()):
            padding += width
        return self.graph.call_function(F.pad, (x, padding)) if any(padding) else x

    def _paddings(self) -> list[tuple[int, int]]:
        """Before and behind, by axis."""
        padding = self.module.padding
        if padding == "valid":
            return [(0, 0)] * self.space
        if padding == "same":
            whole = [d * (size - 1) for d, size in zip(self._per_axis(self.module.dilation), self.window, strict=True)]
            return [(width // 2, width - width // 2) for width in whole]
        return [(width, width) for width in self._per_axis(padding)]

    def _shifted(self, padded: fx.Node, place: tuple[int, ...]) -> fx.Node:
        """What one place of the window sees, wherever the window is laid; whatever the input's size."""
        slices = [slice(None)] * (self.axis + 1)
        strides, dilations = self._per_axis(self.module.stride), self._per_axis(self.module.dilation)
        for at, size, dilation, stride in zip(place, self.window, dilations, strides, strict=True):
            start, behind = dilation * at, dilation * (size - 1 - at)
            slices.append(slice(start or None, -behind or None, stride if stride > 1 else None))
        if all(one == slice(None) for one in slices):
            return padded
        return self.graph.call_function(operator.getitem, (padded, tuple(slices)))
