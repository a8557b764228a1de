"""A helper of `channels`: which slices reach as far as the input happens to be long.

self.pos[:, : x.size(1)]        the example reads 10 of 16 rows, another input 12: all rows stay
y[:, : y.shape[1] // 2]         half of the channels, however long the input is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tgfx.ir.facts import NodeIds
from tgfx.ops.naming import op_name

_SHAPES = {"size", "getattr", "sym_size", "len", "numel", "dim", "ndimension"}
_SPLITS = {"split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_split_with_sizes"}


class FreeSizes:
    """Asked node by node, while the graph is analysed. `nodes`: identities so far; `made`: constants so far."""

    def __init__(self, nodes: dict[str, NodeIds], made: set[str], value: Callable[[fx.Node], Any]) -> None:
        self.nodes, self.made, self.value = nodes, made, value
        self.long: set[int] = set()  # identities on axes that are as long as the input
        self._known: dict[fx.Node, bool] = {}

    def axes(self, node: fx.Node) -> Iterator[int]:
        """Of the node's first argument: where it is sliced, split or padded by such sizes."""
        name, args, kwargs = op_name(node), node.args, node.kwargs
        if not args or not isinstance(args[0], fx.Node) or not isinstance(self.value(args[0]), torch.Tensor):
            return
        ndim = self.value(args[0]).ndim
        if name == "getitem":
            yield from self._indexed(args[1], ndim)
        elif name in ("slice", "narrow"):
            if self._any((args[2:], {k: v for k, v in kwargs.items() if k not in ("dim", "input")})):
                yield self._axis(args, kwargs, 1, 0, ndim)
        elif name in _SPLITS:
            if self._any((args[1:2], {k: v for k, v in kwargs.items() if k not in ("dim", "input", "tensor")})):
                yield self._axis(args, kwargs, 2, 0, ndim)
        elif name in ("pad", "constant_pad_nd"):
            pad = args[1] if len(args) > 1 else kwargs.get("pad", ())
            if isinstance(pad, fx.Node):
                yield from range(ndim) if self.is_free(pad) else ()
            else:
                yield from (ndim - 1 - i // 2 for i, width in enumerate(pad) if self._any(width))  # type: ignore[arg-type]

    def _axis(self, args: tuple, kwargs: dict[str, Any], place: int, default: int, ndim: int) -> int:
        dim = args[place] if len(args) > place else kwargs.get("dim", default)
        return dim % ndim if isinstance(dim, int) else default

    def _indexed(self, index: Any, ndim: int) -> Iterator[int]:
        items = list(index) if isinstance(index, tuple) else [index]
        used = sum(item is not None and item is not Ellipsis for item in items)
        axis = 0
        for item in items:
            if item is Ellipsis:
                axis += ndim - used
            elif item is not None:
                if isinstance(item, slice) and self._any((item.start, item.stop, item.step)):
                    yield axis
                axis += 1

    def _any(self, value: Any) -> bool:
        found: list[bool] = []
        fx.node.map_arg(value, lambda node: found.append(self.is_free(node)))
        return any(found)

    def note(self, node: fx.Node, result: Any) -> None:
        """Numbers are looked at when they are made: what they are made of is there only then."""
        self._known[node] = isinstance(result, torch.Tensor) or self._asked(node)  # free: what a tensor tells

    def is_free(self, node: fx.Node) -> bool:
        """Whether a number depends on how long, wide or many the input is."""
        return self._known.get(node, True)

    def _asked(self, node: fx.Node) -> bool:
        name, source = op_name(node), node.args[0] if node.args else None
        if name in _SHAPES and isinstance(source, fx.Node) and isinstance(self.value(source), torch.Tensor):
            return self._read(node, name, source)
        if (
            name == "getitem"
            and isinstance(source, fx.Node)
            and self._is_shape(source)
            and isinstance(node.args[1], int)
        ):
            of = source.args[0]
            return self._is_long(of, node.args[1] % self.value(of).ndim)  # type: ignore[arg-type]
        return any(self.is_free(arg) for arg in node.all_input_nodes)

    def _is_shape(self, node: fx.Node) -> bool:
        """x.shape or x.size()"""
        whole = op_name(node) == "size" and len(node.args) == 1 and not node.kwargs
        of = node.args[0] if node.args else None
        if not (whole or (op_name(node) == "getattr" and node.args[1] == "shape")):
            return False
        return isinstance(of, fx.Node) and isinstance(self.value(of), torch.Tensor)

    def _read(self, node: fx.Node, name: str, source: fx.Node) -> bool:
        ndim = self.value(source).ndim
        if name in ("dim", "ndimension") or (name == "getattr" and node.args[1] != "shape"):
            return False
        if name == "len":
            return self._is_long(source, 0)
        if name in ("size", "sym_size"):
            axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            if isinstance(axis, int):
                return self._is_long(source, axis % ndim)
        return any(self._is_long(source, axis) for axis in range(ndim))

    def _is_long(self, tensor: fx.Node, axis: int) -> bool:
        """No identity is on an axis of samples or positions, unless it came from a table that is sliced to fit."""
        if tensor.name in self.made:
            return any(self.is_free(arg) for arg in tensor.all_input_nodes)
        known = self.nodes.get(tensor.name)
        ids = known.tensors[0] if known is not None and known.tensors else None
        layers = ids.on_axis(axis) if ids is not None else []
        return not layers or any(not self.long.isdisjoint(layer.reshape(-1).tolist()) for layer in layers)
