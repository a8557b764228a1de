"""Connections of residual sums in a captured graph, opened for gates of their own.

    y = conv2(conv1(x)) + x      ->      y = connect(conv2(conv1(connect(x)))) + x

All that is added up has the same channels, so one gate for a channel of the sum decides in all layers that add to it
or read it. With connections each branch is asked which channels it adds, and each layer which ones it reads; the sum
itself stays whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np
from torch import fx

from tgfx.ir.facts import ChannelMap
from tgfx.ir.source import Source
from tgfx.ir.switches import Branch
from tgfx.ops.connection import CONNECT
from tgfx.ops.naming import op_name, tapped_weight

# layers that mix all channels of their first argument with a weight
READERS = {
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
}  # fmt: skip


def open_connections(
    source: Source, channels: ChannelMap, branches: Iterable[Branch], tapped: Container[str] = ()
) -> int:
    """Write connections into the graph of `source`, which is our own; how many.

    `branches`: the residual branches that `channels`, an analysis of the graph without connections, shows. `tapped`:
    weights of layers that decide for each tap what they read, and need no connection to read by.
    """
    finder = _Finder(source, channels)
    edges = [edge for branch in branches for edge in branch.edges]
    sums = [finder.by_name[edge.node] for edge in edges]
    readers = [(node, axis) for node, axis in finder.readers_of(sums) if tapped_weight(node, tapped) is None]
    graph = source.module.graph
    count = 0
    for reader, axis in readers:
        x = reader.args[0]
        with graph.inserting_before(reader):
            reader.args = (_connect(graph, x, axis, into=False), *reader.args[1:])  # type: ignore[arg-type]
        count += 1
    for edge in edges:
        addition = finder.by_name[edge.node]
        axis = finder.axis_of(addition)
        if axis is None:
            continue
        with graph.inserting_before(addition):
            value = _connect(graph, addition.args[edge.position], axis, into=True)  # type: ignore[arg-type]
            addition.update_arg(edge.position, value)
        count += 1
    graph.lint()
    source.module.recompile()
    return count


def _connect(graph: fx.Graph, x: fx.Node, axis: int, *, into: bool) -> fx.Node:
    node = graph.call_function(CONNECT, (x, axis, into))
    node.meta = dict(x.meta)
    return node


class _Finder:
    def __init__(self, source: Source, channels: ChannelMap) -> None:
        self.source, self.channels = source, channels
        self.by_name = {node.name: node for node in source.module.graph.nodes}

    def axis_of(self, node: fx.Node) -> int | None:
        """The axis along which the channels of a value lie, if it is one and they can be told apart."""
        known = self.channels.nodes.get(node.name)
        ids = known.single if known is not None else None
        if ids is None:
            return None
        axes = {int(np.argmax(layer.shape)) for layer in ids.layers}
        plain = all(layer.numel() == max(layer.shape) for layer in ids.layers)
        return axes.pop() if len(axes) == 1 and plain else None

    def readers_of(self, sums: Iterable[fx.Node]) -> list[tuple[fx.Node, int]]:
        """Layers that read a value which has the channels of one of these sums, in the order of the graph."""
        shared = [self._roots(node) for node in sums if self.axis_of(node) is not None]
        roots = np.unique(np.concatenate(shared)) if shared else np.zeros(0, np.int64)
        found = []
        for node in self.by_name.values():
            x = node.args[0] if node.args else None
            if op_name(node, self.source.module) not in READERS or not isinstance(x, fx.Node):
                continue
            axis = self.axis_of(x)
            if axis is not None and np.isin(self._roots(x), roots).any():
                found.append((node, axis))
        return found

    def _roots(self, node: fx.Node) -> np.ndarray:
        ids = self.channels.nodes[node.name].single
        layers = [layer.reshape(-1).numpy() for layer in ids.layers] if ids is not None else []
        return self.channels.space.find(np.concatenate(layers))
