"""Where the order of channels is free: a convolution makes them in the order of its rows, and another takes them in the
order of its columns, with nothing but channel-wise nodes between it and the place where the order changes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from tgfx.optional_packages import needed

# from one input to one output, channel by channel
BY_CHANNEL = {
    "Abs", "AveragePool", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "GlobalAveragePool", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "MaxPool", "Mish", "Neg", "Relu", "Selu", "Sigmoid",
    "Softplus", "Tanh",
}  # fmt: skip
POOLED = {"GlobalAveragePool", "GlobalMaxPool"}  # what Flatten may follow: one number a channel
Chain = list[Any]


class Wiring:
    """Who makes and who reads each value of a graph, as it is now."""

    def __init__(self, model: Any) -> None:
        self.weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self.outputs = {value.name for value in model.graph.output}
        self.producer = {name: node for node in model.graph.node for name in node.output if name}
        self.readers: dict[str, list[Any]] = defaultdict(list)
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                self.readers[name].append(node)

    def constant(self, name: str) -> np.ndarray | None:
        return needed("onnx").numpy_helper.to_array(self.weights[name]) if name in self.weights else None

    def reading(self, name: str, node: Any) -> Chain | None:
        """From `node`, which reads `name`, to the layer that mixes these channels; None if their order matters."""
        chain: Chain = []
        single = False  # whether there is one number a channel, so that nothing is interleaved by flattening
        while True:
            if node.input[0] != name or list(node.input).count(name) != 1 or len(node.output) != 1:
                return None
            chain.append(node)
            if self._is_full(node) or self._is_product(node):
                return chain
            single = node.op_type in POOLED or (single and node.op_type in {"Flatten", *BY_CHANNEL})
            if not (self._is_channelwise(node) or (single and node.op_type == "Flatten")):
                return None
            name = node.output[0]
            if name in self.outputs or len(self.readers[name]) != 1:
                return None
            (node,) = self.readers[name]

    def making(self, name: str) -> Chain | None:
        """The full convolution that makes the channels of `name`, and what follows up to there; None if there is none.
        Who reads `name` itself is the caller's concern."""
        chain: Chain = []
        while name in self.producer and name not in self.outputs:
            node = self.producer[name]
            if len(node.output) != 1 or (chain and len(self.readers[name]) != 1):
                return None
            chain.insert(0, node)
            if self._is_full(node):
                return chain
            if not self._is_channelwise(node):
                return None
            name = node.input[0]
        return None

    def made(self, chain: Chain) -> int:
        """How many channels a chain of `making` makes."""
        return int(self.weights[chain[0].input[1]].dims[0])

    def taken(self, chain: Chain) -> int:
        """How many channels a chain of `reading` takes."""
        last = chain[-1]
        axis = 1 if last.op_type == "Conv" or _number(last, "transB") else 0
        return int(self.weights[last.input[1]].dims[axis])

    def _is_full(self, node: Any) -> bool:
        return node.op_type == "Conv" and _number(node, "group", 1) == 1 and self._owns_weights(node)

    def _is_channelwise(self, node: Any) -> bool:
        if node.op_type in ("ReduceMean", "ReduceMax"):
            axes = self.constant(node.input[1]) if len(node.input) > 1 else None
            return axes is not None and bool((axes >= 2).all())
        return node.op_type in BY_CHANNEL or self._is_depthwise(node)

    def _is_depthwise(self, node: Any) -> bool:
        if node.op_type != "Conv" or not self._owns_weights(node):
            return False
        kernel = self.weights[node.input[1]]
        return _number(node, "group", 1) == kernel.dims[0] and kernel.dims[1] == 1

    def _is_product(self, node: Any) -> bool:
        """Of two axes, so that channels are the second."""
        return node.op_type == "Gemm" and not _number(node, "transA") and self._owns_weights(node)

    def _owns_weights(self, node: Any) -> bool:
        own = [name for name in node.input[1:] if name]
        return all(name in self.weights and name not in self.outputs and self.readers[name] == [node] for name in own)

    def reorder_reading(self, chain: Chain, order: np.ndarray) -> None:
        """The chain is to be given the channels order[0], order[1] ... of what it was given before."""
        for node in chain[:-1]:
            if node.op_type == "Conv":
                self._take(node.input[1:], order, 0)
        last = chain[-1]
        columns = 1 if last.op_type == "Conv" or _number(last, "transB") else 0
        self._take(last.input[1:2], order, columns)  # its bias belongs to its outputs, which stay

    def reorder_making(self, chain: Chain, order: np.ndarray) -> None:
        """The chain is to make the channels order[0], order[1] ... of what it made before."""
        for node in chain:
            if node.op_type == "Conv":
                self._take(node.input[1:], order, 0)

    def _take(self, names: Any, order: np.ndarray, axis: int) -> None:
        numpy_helper = needed("onnx").numpy_helper
        for name in names:
            if name:
                moved = np.ascontiguousarray(numpy_helper.to_array(self.weights[name]).take(order, axis))
                self.weights[name].CopyFrom(numpy_helper.from_array(moved, name))


def forget(model: Any, names: set[str]) -> None:
    """Values that are no longer what torch calls by their names: the comparison node by node must not meet them."""
    renamed = {name: f"{name}_in_order" for name in names}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = renamed.get(name, name)
    alive = {name for node in model.graph.node for name in node.output}
    kept = [value for value in model.graph.value_info if value.name in alive and value.name not in names]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def drop_unused(model: Any) -> None:
    """Initialisers that nobody reads any more."""
    if has_subgraphs(model):
        return  # they may be read there
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    if len(kept) != len(model.graph.initializer):
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)


def has_subgraphs(model: Any) -> bool:
    """Whether there are nodes (If, Loop) whose inner graphs may read any value of this one without saying so."""
    return any(attribute.HasField("g") or attribute.graphs for node in model.graph.node for attribute in node.attribute)


def _number(node: Any, name: str, default: int = 0) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
