"""A helper of `channels`: gates of channels that share an axis with samples or positions.

    q = project(x).view(B, N, H, d).transpose(1, 2)      channels [1, H, 1, d]: a gate for every head and position in it
    q.reshape(B * H, N, d) @ ...                         as many as the batch says, in the order of the reshape
    conv(x).flatten(1).norm(dim=1)                       as many as the image is large

No list of gates is right for every batch and every size there. So the gate starts where its channels have axes of their
own, is expanded to the value there, and goes through the same data movement:

    gate.expand(q.shape).reshape(B * H, N, d)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tgfx.ir.facts import NodeIds, Route
from tgfx.ir.ids import IdSpace, squeezed_atoms
from tgfx.ir.other_batch import OtherBatch
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, source_line
from tgfx.ops.movement import squeezed
from tgfx.ops.naming import op_name

RESHAPES = {"view", "reshape", "flatten", "Flatten", "unflatten", "Unflatten", "ravel", "view_as", "reshape_as"}
# what makes an axis longer or shorter, by what need not be a number
_LONGER = {"repeat", "expand", "pixel_shuffle", "pixel_unshuffle", "PixelShuffle", "PixelUnshuffle"}
MOVES = {
    *RESHAPES, "transpose", "permute", "movedim", "contiguous", "clone", "squeeze", "unsqueeze", "getitem", "t",
    "flip", "channel_shuffle", "ChannelShuffle", *_LONGER,
}  # fmt: skip
_SLICES = {"getitem", "narrow", "slice", "index_select", "index", "gather", "take_along_dim", "roll"}
_UNKNOWN = object()
_ALONG_ONE = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_ALONG_LAST = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
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


class _Longer(OtherBatch):
    """The example with some axes twice as long. Of what refuses that, and of all behind it, nothing is known."""

    def __init__(self, source: Source, axes: frozenset[tuple[int, int]]) -> None:
        self.axes = axes  # (which tensor of the example, axis)
        super().__init__(source)

    def _starts(self) -> bool:
        leaves, spec = tree_flatten(self.source.flat_inputs())
        longer = tree_unflatten([self._resized(index, leaf) for index, leaf in enumerate(leaves)], spec)
        placeholders = [node for node in self.source.module.graph.nodes if node.op == "placeholder"]
        self._values = dict(zip(placeholders, longer, strict=True))
        return True

    def _resized(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = self._mode.from_tensor(value)
        with self._mode:
            for axis in range(value.ndim):
                value = torch.cat([value, value], axis) if (index, axis) in self.axes else value
        return value

    def _call(self, node: fx.Node) -> Any:
        if any(self._values[arg] is _UNKNOWN for arg in node.all_input_nodes):
            return _UNKNOWN
        try:
            with _unlogged():
                return super()._call(node)
        except Exception:  # a size that is written down in the code, an answer that needs numbers
            return _UNKNOWN


@contextmanager
def _unlogged() -> Iterator[None]:
    """What is tried and refused is no error, though torch logs it as one."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class OtherSizes:
    """Shapes of a graph's values at other batches and sizes of its input: an axis after the other twice as long."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def _tried(self) -> list[_Longer]:
        """Axes of the same number or of the same size go together: words and their mask, width and height."""
        alike: dict[tuple[str, int], set[tuple[int, int]]] = {}
        for index, leaf in enumerate(tree_leaves(self.source.flat_inputs())):
            for axis, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
                alike.setdefault(("axis", axis), set()).add((index, axis))
                alike.setdefault(("size", size), set()).add((index, axis))
        return [_Longer(self.source, axes) for axes in dict.fromkeys(map(frozenset, alike.values()))]

    def change(self, node: fx.Node, here: tuple[int, ...], axes: list[int]) -> bool:
        """Whether one of these axes of a node's value, `here` on the example, has another size at another input."""
        for other in self._tried if axes else ():
            shape = other.shape(node)
            if shape is not None and len(shape) == len(here) and any(shape[axis] != here[axis] for axis in axes):
                return True
        return False

    def both(self, a: fx.Node, b: fx.Node) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | None]]:
        """Shapes of two values at every other size at which the first is known."""
        for other in self._tried:
            shape = other.shape(a)
            if shape is not None:
                yield shape, other.shape(b)

    def agree(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values are as large as each other, wherever that is known of both."""
        return all(two is None or one == two for one, two in self.both(a, b))


class GateRoutes:
    """Asked during the analysis, for values that have been computed."""

    def __init__(self, source: Source, space: IdSpace, nodes: Mapping[str, NodeIds]) -> None:
        self.source, self.space, self.nodes = source, space, nodes
        self._sizes = OtherSizes(source)

    def is_free(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether channels have the same places on the axes along which a layer varies, at every size of the input."""
        least = squeezed_atoms(self.space, layer)
        if least.numel() < layer.numel() and self._changes(node, _varying(layer)):
            return False  # written out along an axis on which nothing differs by now
        layer = least
        if self._is_as_written(node, layer):
            return True
        while not self._changes(node, _varying(layer)):
            name = self._op(node)
            if name in RESHAPES:
                return not self._mixes(node, layer)
            if self._sliced(node, layer) is not None:
                return False
            step = self._alike(node, layer) if _is_pointwise(node, name) else self._moved(node, layer)
            if step is None:
                return True
            node, layer, _ = step
        return False

    def route(self, node: fx.Node, layer: torch.Tensor) -> Route | None:
        """From where on, and through what, a gate comes to have the layout of `layer`."""
        moves: list[str] = []
        layer = squeezed_atoms(self.space, layer)
        while not self.is_free(node, layer):
            whole = self._sliced(node, layer)
            if whole is not None:
                self._keep(whole, node)
                return None
            step = self._alike(node, layer)
            if step is None or not self._sizes.agree(step[0], node):
                step = self._moved(node, layer)
            if step is None:
                return None
            before, layer, is_move = step
            moves += [node.name] * is_move
            node = before
        return Route(node.name, layer, tuple(reversed(moves)))

    def _is_as_written(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether a layer's module or plain numbers in a reshape say how long these axes are, and nothing is merged."""
        while True:
            name = self._op(node)
            if name in ("view", "reshape"):
                sizes, varying = _sizes_given(node), _varying(layer)
                written = len(sizes) == layer.ndim and all(_is_size(sizes[axis]) for axis in varying)
                return written and all(len(axes) == 1 for axes in self._made_of(node, varying))
            step = None
            if _is_pointwise(node, name):
                step = self._alike(node, layer)
            elif name not in RESHAPES | _LONGER:
                step = self._moved(node, layer)
            if step is None:
                return node.op in ("get_attr", "placeholder") or self._is_of_layer(node, layer)
            node, layer, _ = step

    def _is_of_layer(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether the axis is one that a layer has weights for, and so as long as those."""
        module = self.source.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        axis = 1 if isinstance(module, _ALONG_ONE) else layer.ndim - 1 if isinstance(module, _ALONG_LAST) else None
        return axis is not None and _varying(layer) == [axis]

    def _changes(self, node: fx.Node, axes: list[int]) -> bool:
        here = self._shape(node)
        return here is not None and self._sizes.change(node, here, axes)

    def _mixes(self, node: fx.Node, layer: torch.Tensor) -> bool:
        """Whether a reshape lays channels elsewhere on their axes where others of its axes are longer."""
        x, step = moved_value(node), self._moved(node, layer)
        before = self._shape(x) if x is not None else None
        if x is None or before is None:
            return False
        made_of = [axis for axes in self._made_of(node, _varying(layer)) if len(axes) > 1 for axis in axes]
        for other, after in self._sizes.both(x, node):
            if len(other) != len(before) or all(other[axis] == before[axis] for axis in made_of):
                continue
            if step is None or after is None or not self._lies_alike(step[1], other, after, layer):
                return True
        return False

    def _lies_alike(
        self, own: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...], layer: torch.Tensor
    ) -> bool:
        """Whether a reshape between these sizes makes `layer` of `own`, as that on the example does."""
        given, wanted = self.space.find(own.numpy()), self.space.find(layer.numpy())
        try:
            moved, wanted = np.broadcast_arrays(np.broadcast_to(given, before).reshape(after), wanted)
        except ValueError:  # channels along an axis that is longer
            return False
        return bool((moved == wanted).all())

    def _made_of(self, node: fx.Node, axes: list[int]) -> list[list[int]]:
        """For axes of what a reshape gives: axes of its input that they are made of."""
        x, after = moved_value(node), self._shape(node)
        before = self._shape(x) if x is not None else None
        if before is None or after is None:
            return [[] for _ in axes]
        blocks = _blocks(before, after)
        return [next((ins for ins, outs in blocks if axis in outs), []) for axis in axes]

    def _sliced(self, node: fx.Node, layer: torch.Tensor) -> fx.Node | None:
        """The value of which a node takes a part, by numbers, where other channels lie at another size of the input."""
        x = moved_value(node) if self._op(node) in _SLICES else None
        if x is not None and self._shape(x) is None:
            x = moved_value(x)  # one of a list of parts
        here, part = (self._shape(x), self._shape(node)) if x is not None else (None, None)
        if x is None or here is None or part is None or len(here) != len(part):
            return None
        axes = [axis for axis in _varying(layer) if self._changes(x, [axis])]
        if any(here[axis] != part[axis] for axis in axes):
            return x
        for whole, other in self._sizes.both(x, node):
            if other is not None and any(whole[axis] != other[axis] for axis in axes):
                return x
        return None

    def _keep(self, x: fx.Node, node: fx.Node) -> None:
        """No cut could follow such a slice, and whatever it does not show on the example it may at another size."""
        place = Refusal("is sliced where it shares an axis with positions or samples", node.name, self._op(node))
        for own in self._layers(x):
            self.space.freeze(own.numpy(), replace(place, source=source_line(node), limit=True))

    def _alike(self, node: fx.Node, layer: torch.Tensor) -> tuple[fx.Node, torch.Tensor, bool] | None:
        """An operand that has the same channels in the same places, as of pointwise operators."""
        for arg in node.all_input_nodes:
            if self._shape(arg) == self._shape(node) and self._op(node) not in MOVES:
                for own in self._layers(arg):
                    if self._same(own, layer):
                        return arg, own, False
        return None

    def _moved(self, node: fx.Node, layer: torch.Tensor) -> tuple[fx.Node, torch.Tensor, bool] | None:
        arg = moved_value(node)
        if self._op(node) not in MOVES or arg is None:
            return None
        for own in self._layers(arg):
            moved = self._run(node, own.expand(self._shape(arg) or ()))
            if moved is not None and self._same(squeezed(moved), layer):
                return arg, own, True
        return None

    def _run(self, node: fx.Node, ids: torch.Tensor) -> torch.Tensor | None:
        """What a move makes of ids on the example."""
        name, shape = self._op(node), self._shape(node) or ()
        if name in RESHAPES:
            return ids.reshape(shape)
        if name == "expand":
            return ids.expand(shape)
        if name == "repeat":
            before = (1,) * (len(shape) - ids.ndim) + tuple(ids.shape)
            return ids.repeat([after // size for after, size in zip(shape, before, strict=True)])
        if len(node.all_input_nodes) > 1:
            return None
        if node.op == "call_module":
            return self.source.module.get_submodule(str(node.target))(ids)
        given: tuple[Any, ...] = node.args[1:]
        options = {key: value for key, value in node.kwargs.items() if not isinstance(value, fx.Node)}
        if node.op == "call_method":
            return getattr(ids, str(node.target))(*given, **options)
        return node.target(ids, *given, **options) if node.op == "call_function" else None  # type: ignore[operator]

    def _op(self, node: fx.Node) -> str:
        name = op_name(node, self.source.module)
        return "t" if name == "getattr" and node.args[1] in ("T", "mT", "H", "mH") else name

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        a, b = squeezed_atoms(self.space, a), squeezed_atoms(self.space, b)
        return a.shape == b.shape and bool((self.space.find(a.numpy()) == self.space.find(b.numpy())).all())

    def _layers(self, node: fx.Node) -> tuple[torch.Tensor, ...]:
        known = self.nodes.get(node.name)
        layers = known.single.layers if known is not None and known.single is not None else ()
        return tuple(squeezed_atoms(self.space, layer) for layer in layers)

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


def moved_value(node: fx.Node) -> fx.Node | None:
    """What a node that moves data is given, by place or by name."""
    x = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return x if isinstance(x, fx.Node) else None


def _blocks(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Axes before and after a reshape, in the smallest runs that hold the same entries; ones go with what follows."""
    found: list[tuple[list[int], list[int]]] = []
    i = o = 0
    while i < len(before) and o < len(after):
        ins, outs, size_in, size_out = [i], [o], before[i], after[o]
        while size_in != size_out and (i + 1 < len(before) if size_in < size_out else o + 1 < len(after)):
            if size_in < size_out:
                i += 1
                ins.append(i)
                size_in *= before[i]
            else:
                o += 1
                outs.append(o)
                size_out *= after[o]
        found.append((ins, outs))
        i, o = i + 1, o + 1
    if found:
        found[-1][0].extend(range(i, len(before)))
        found[-1][1].extend(range(o, len(after)))
    return found


def _varying(layer: torch.Tensor) -> list[int]:
    return [axis for axis, size in enumerate(layer.shape) if size > 1]


def _sizes_given(node: fx.Node) -> tuple[Any, ...]:
    given = (*node.args[1:], *node.kwargs.values())
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


def _is_size(given: Any) -> bool:
    return type(given) is int and given > 0
