"""Frozen facts that the channel analysis hands to the later passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tgfx.ir.ids import IdSpace
from tgfx.ir.layer_shape import LayerShape
from tgfx.ir.refusal import Refusal

WHOLE = -1
TAPS = -2


@dataclass(frozen=True)
class Axis:
    """One axis of something that has channels of its own.

    kind: "param", "buffer", "const" (a tensor made inside the graph), "expand" (a broadcast axis) or "connection" (to a
    residual sum). Axis WHOLE stands for the thing as a whole, TAPS for what a convolution's weight reads: each entry of
    its window in each input channel.
    """

    kind: str
    name: str
    axis: int

    def __str__(self) -> str:
        return self.name if self.axis == WHOLE else f"{self.name}[{self.place}]"

    @property
    def place(self) -> str:
        return "taps" if self.axis == TAPS else str(self.axis)


@dataclass(frozen=True)
class TensorIds:
    """Identity layers of one tensor: each broadcasts to its shape, size 1 where it is constant."""

    shape: tuple[int, ...]
    layers: tuple[torch.Tensor, ...] = ()

    def on_axis(self, axis: int) -> tuple[torch.Tensor, ...]:
        """The layers that vary along `axis`."""
        axis %= max(len(self.shape), 1)
        return tuple(layer for layer in self.layers if layer.shape[axis] > 1)

    def covers(self, axis: int) -> bool:
        return any(layer.shape[axis] > 1 for layer in self.layers)


@dataclass(frozen=True)
class NodeIds:
    """What is known of a node's value: a TensorIds per tensor in it, in flattening order."""

    tensors: tuple[TensorIds | None, ...] = ()

    @property
    def single(self) -> TensorIds | None:
        return self.tensors[0] if len(self.tensors) == 1 else None


@dataclass(frozen=True)
class Route:
    """How a gate comes to an operand whose channels share an axis with samples or positions (tgfx.passes.gate_routes).

    node: where it starts, in the shape of `layer`, expanded to the node's value; moves: nodes that move data on from
    there.
    """

    node: str
    layer: torch.Tensor
    moves: tuple[str, ...]


@dataclass(frozen=True)
class Operand:
    """Something a gate can be multiplied to: a parameter by name, or an input node of the reader."""

    kind: str  # "param" or "node"
    name: str
    layer: torch.Tensor
    index: int = 0  # which tensor of the node's value, for nodes that give several
    route: Route | None = None

    @property
    def start(self) -> torch.Tensor:
        """The layer in whose shape the gate is made."""
        return self.layer if self.route is None else self.route.layer


@dataclass(frozen=True)
class Read:
    """A place where channels are summed up, so that dead ones must count for nothing.

    kind "zero": one of the options must be zero at dead channels;
    kind "masked": the node has a masked form that takes the gate itself (LayerNorm, mean ...).
    """

    node: str
    op: str
    kind: str
    layer: torch.Tensor
    options: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Work:
    """FLOPs of one ATen call: `factor` times the number of living channels on each of `axes`."""

    node: str
    op: str
    factor: int
    axes: tuple[torch.Tensor, ...]
    counted: bool  # part of "flops" (conv and fully-connected); otherwise only of "flops_all"


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its shape, and the ids of its input and output channels (each [layers, length]).

    rows: ids along the rows of a fully-connected layer's input, where they have any.
    """

    node: str
    shape: LayerShape
    ins: torch.Tensor
    outs: torch.Tensor
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Shuffle:
    """A chain of data movement that as a whole is `x.index_select(axis, order)` and gives its last node's value.

    x: its input; nodes: the chain in order; inside: nodes that only serve it, and are not needed where it is replaced.
    """

    x: str
    nodes: tuple[str, ...]
    inside: frozenset[str]
    axis: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class ChannelMap:
    """Result of the channel analysis over a captured graph."""

    space: IdSpace
    params: dict[str, TensorIds]
    buffers: dict[str, TensorIds]
    nodes: dict[str, NodeIds]
    reads: tuple[Read, ...]
    work: tuple[Work, ...]
    heads: tuple[Work, ...]  # per attention: its heads, as axes of ids; empty unless heads are asked for
    channels: dict[str, torch.Tensor]  # weight of a conv or fully-connected layer -> ids of its output channels
    const_nodes: frozenset[str]
    grouping: dict[str, str] = field(default_factory=dict)  # node -> "within" or "across" groups
    seen_args: dict[str, tuple[tuple, dict]] = field(default_factory=dict)  # sizes as the run saw them
    containers: frozenset[str] = frozenset()  # nodes whose value is not one tensor
    copies: frozenset[str] = frozenset()  # nodes that gave a copy, though the operator gives a view where it can
    shuffles: tuple[Shuffle, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    batch: int = 1
    layers: tuple[LayerCall, ...] = ()
    taps: dict[str, torch.Tensor] = field(default_factory=dict)  # weight of a convolution -> ids [1, in, *window]
    training: ChannelMap | None = None  # of the graph for train mode, where the model has one of its own
