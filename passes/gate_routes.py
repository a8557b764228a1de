"""A helper of `channels`: gates of channels that share an axis with the batch.

    q = project(x).view(B, N, H, d).transpose(1, 2)      channels [1, H, 1, d]: a gate for every head and position in it
    q.reshape(B * H, N, d) @ ...                         as many as the batch says, in the order of the reshape

No list of gates is right for every batch there. So the gate starts where its channels have axes of their own, is
expanded to the value there, and goes through the same data movement:

    gate.expand(q.shape).reshape(B * H, N, d)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tgfx.ir.facts import NodeIds, Route
from tgfx.ir.ids import IdSpace
from tgfx.ir.other_batch import OtherBatch
from tgfx.ir.source import Source
from tgfx.ops.movement import squeezed
from tgfx.ops.naming import op_name

RESHAPES = {"view", "reshape", "flatten", "Flatten", "unflatten", "Unflatten"}
MOVES = {
    *RESHAPES, "transpose", "permute", "movedim", "contiguous", "clone", "squeeze", "unsqueeze", "getitem", "t",
    "repeat", "expand",
}  # fmt: skip
# element by element, though torch has no such tag for them
_POINTWISE = {
    "iadd",
    "imul",
    "isub",
    "truediv",
    "itruediv",
    "to",
    "float",
    "softmax",
    "dropout",
    "type_as",
    "masked_fill",
}


class GateRoutes:
    """Asked during the analysis, for values that have been computed."""

    def __init__(self, source: Source, space: IdSpace, nodes: Mapping[str, NodeIds]) -> None:
        self.source, self.space, self.nodes = source, space, nodes
        self._other: OtherBatch | None = None

    def is_free(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether the axes along which this layer of a node's value varies are as long at every batch."""
        if self._is_as_written(node, layer):
            return True
        other, here = self._other_shape(node), self._shape(node)
        if other is None or here is None or len(other) != len(here) or len(layer.shape) != len(here):
            return True
        return all(other[axis] == here[axis] for axis in _varying(layer))

    def route(self, node: fx.Node, layer: torch.Tensor) -> Route | None:
        """From where on, and through what, a gate comes to have the layout of `layer`."""
        moves: list[str] = []
        while not self.is_free(node, layer):
            step = self._alike(node, layer)
            if step is None or self._other_shape(step[0]) != self._other_shape(node):
                step = self._moved(node, layer)
            if step is None:
                return None
            before, layer, is_move = step
            moves += [node.name] * is_move
            node = before
        return Route(node.name, layer, tuple(reversed(moves)))

    def _is_as_written(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether a layer's module or plain numbers in a reshape say how long these axes are."""
        while True:
            name = op_name(node, self.source.module)
            if name in ("view", "reshape"):
                sizes = _sizes_given(node)
                return len(sizes) == layer.ndim and all(_is_size(sizes[axis]) for axis in _varying(layer))
            step = None
            if _is_pointwise(node, name):
                step = self._alike(node, layer)
            elif name not in (*RESHAPES, "repeat", "expand"):
                step = self._moved(node, layer)
            if step is None:
                return node.op in ("get_attr", "placeholder", "call_module") and name not in RESHAPES
            node, layer, _ = step

    def _alike(self, node: fx.Node, layer: torch.Tensor) -> tuple[fx.Node, torch.Tensor, bool] | None:
        """An operand that has the same channels in the same places, as of pointwise operators."""
        for arg in node.all_input_nodes:
            if self._shape(arg) == self._shape(node) and op_name(node, self.source.module) not in MOVES:
                for own in self._layers(arg):
                    if self._same(own, layer):
                        return arg, own, False
        return None

    def _moved(self, node: fx.Node, layer: torch.Tensor) -> tuple[fx.Node, torch.Tensor, bool] | None:
        arg = node.args[0] if node.args else None
        if op_name(node, self.source.module) not in MOVES or not isinstance(arg, fx.Node):
            return None
        for own in self._layers(arg):
            moved = self._run(node, own.expand(self._shape(arg) or ()))
            if moved is not None and self._same(squeezed(moved), layer):
                return arg, own, True
        return None

    def _run(self, node: fx.Node, ids: torch.Tensor) -> torch.Tensor | None:
        """What a move makes of ids on the example."""
        name, shape = op_name(node, self.source.module), self._shape(node) or ()
        if name in RESHAPES:
            return ids.reshape(shape)
        if name == "expand":
            return ids.expand(shape)
        if name == "repeat":
            before = (1,) * (len(shape) - ids.ndim) + tuple(ids.shape)
            return ids.repeat([after // size for after, size in zip(shape, before, strict=True)])
        if len(node.all_input_nodes) > 1:
            return None
        given: tuple[Any, ...] = node.args[1:]
        if node.op == "call_method":
            return getattr(ids, str(node.target))(*given, **node.kwargs)
        return node.target(ids, *given, **node.kwargs) if node.op == "call_function" else None  # type: ignore[operator]

    def _other_shape(self, node: fx.Node) -> tuple[int, ...] | None:
        self._other = self._other or OtherBatch(self.source)
        return self._other.shape(node)

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and bool((self.space.find(a.numpy()) == self.space.find(b.numpy())).all())

    def _layers(self, node: fx.Node) -> tuple[torch.Tensor, ...]:
        known = self.nodes.get(node.name)
        return known.single.layers if known is not None and known.single is not None else ()

    def _shape(self, node: fx.Node) -> tuple[int, ...] | None:
        known = self.nodes.get(node.name)
        return known.single.shape if known is not None and known.single is not None else None


def _is_pointwise(node: fx.Node, name: str) -> bool:
    """Whether the size of an axis is that of the operands' axis. Layers have no sizes that follow the batch."""
    if node.op == "call_module":
        return name not in MOVES
    packet = getattr(torch.ops.aten, name, None) if node.op in ("call_function", "call_method") else None
    overloads = [getattr(packet, key) for key in packet.overloads()] if packet is not None else []
    return name in _POINTWISE or any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _varying(layer: torch.Tensor) -> list[int]:
    return [axis for axis, size in enumerate(layer.shape) if size > 1]


def _sizes_given(node: fx.Node) -> tuple[Any, ...]:
    given = (*node.args[1:], *node.kwargs.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


def _is_size(given: Any) -> bool:
    return type(given) is int and given > 0
