"""Channel look-ups that disappear into weights.

Before:  Gather(x, order, axis=1) -> Relu -> depthwise Conv -> Conv(W)
After:   x -> Relu -> depthwise Conv' -> Conv(W'),   W'[:, order[j]] = W[:, j]

A ragged channel shuffle is cut to such a look-up. Without it a model is faster, and is computed rightly by more
runtimes: pnnx 20261020 takes the order for a single index, OpenVINO 2026.4 folds it in the wrong direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.optional_packages import needed

# from one input to one output, channel by channel
BY_CHANNEL = {
    "Abs", "AveragePool", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "GlobalAveragePool", "GlobalMaxPool",
    "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "MaxPool", "Mish", "Neg", "Relu", "Selu", "Sigmoid",
    "Softplus", "Tanh",
}  # fmt: skip


def fold_look_ups(model: Any) -> Any:
    """In place. Only permutations of all channels, where everything up to the next full convolution is channel-wise."""
    numpy_helper = needed("onnx").numpy_helper
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for gather in [node for node in model.graph.node if node.op_type == "Gather"]:
        order = _order(gather, weights, numpy_helper)
        if order is None:
            continue
        chain = _chain(model, gather, weights)
        if chain is None or weights[chain[-1].input[1]].dims[1] != len(order):
            continue
        back = np.argsort(order)  # position of each channel of x among those that were looked up
        for node in chain:
            if node.op_type == "Conv":
                _permute(node, weights, back, 1 if node is chain[-1] else 0, numpy_helper)
        chain[0].input[0] = gather.input[0]
        model.graph.node.remove(gather)
        _forget(model, {gather.output[0], *(node.output[0] for node in chain[:-1])})
    _drop_unused(model)
    return model


def _order(gather: Any, weights: dict[str, Any], numpy_helper: Any) -> np.ndarray | None:
    """The permutation that a look-up makes of all channels; None if it is something else."""
    axis = next((attribute.i for attribute in gather.attribute if attribute.name == "axis"), 0)
    if axis != 1 or gather.input[1] not in weights or gather.input[0] in weights:
        return None
    order = numpy_helper.to_array(weights[gather.input[1]])
    if order.ndim != 1 or not np.array_equal(np.sort(order), np.arange(len(order))):
        return None
    return order


def _chain(model: Any, gather: Any, weights: dict[str, Any]) -> list[Any] | None:
    """The nodes from a look-up to the convolution that takes it in; None if anything else reads one of them."""
    outputs = {value.name for value in model.graph.output}
    chain: list[Any] = []
    name = gather.output[0]
    while True:
        readers = [node for node in model.graph.node if name in node.input]
        if len(readers) != 1 or name in outputs or readers[0].input[0] != name or len(readers[0].output) != 1:
            return None
        node = readers[0]
        chain.append(node)
        if node.op_type == "Conv":
            own = [given for given in node.input[1:] if given]
            shared = any(sum(one in other.input for other in model.graph.node) != 1 for one in own)
            if shared or any(one not in weights for one in own):
                return None
            kernel = weights[node.input[1]]
            groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
            if groups == 1:
                return chain
            if groups != kernel.dims[0] or kernel.dims[1] != 1:
                return None
        elif node.op_type not in BY_CHANNEL:
            return None
        name = node.output[0]


def _permute(conv: Any, weights: dict[str, Any], back: np.ndarray, axis: int, numpy_helper: Any) -> None:
    for place, name in enumerate(conv.input[1:], 1):
        if name and (place == 1 or axis == 0):  # a full convolution's bias belongs to its outputs, which stay
            moved = np.ascontiguousarray(numpy_helper.to_array(weights[name]).take(back, axis if place == 1 else 0))
            weights[name].CopyFrom(numpy_helper.from_array(moved, name))


def _forget(model: Any, names: set[str]) -> None:
    """Values that are no longer what torch calls by their names: the comparison node by node must not meet them."""
    renamed = {name: f"{name}_in_order" for name in names}
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = renamed.get(name, name)
    kept = [value for value in model.graph.value_info if value.name not in names]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def _drop_unused(model: Any) -> None:
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    if len(kept) != len(model.graph.initializer) and not _has_subgraphs(model):
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)


def _has_subgraphs(model: Any) -> bool:
    return any(attribute.HasField("g") or attribute.graphs for node in model.graph.node for attribute in node.attribute)
