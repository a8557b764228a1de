"""Channel look-ups that disappear into weights.

Before:  Gather(x, order, axis=1) -> Relu -> depthwise Conv -> Conv(W)
After:   x -> Relu -> depthwise Conv' -> Conv(W'),   W'[:, order[j]] = W[:, j]

A ragged channel shuffle is cut to such a look-up. Without it a model is faster, and is computed rightly by more
runtimes: pnnx 20261020 takes the order for a single index, OpenVINO 2026.4 folds it in the wrong direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.onnx_export.channel_chains import Wiring, drop_unused, forget
from tgfx.onnx_export.node_facts import NodeFacts


def fold_look_ups(model: Any) -> Any:
    """In place. Only permutations of all channels, where everything up to the next full layers is channel-wise."""
    gathers = [node for node in model.graph.node if node.op_type == "Gather"]
    facts = NodeFacts(model) if gathers else None
    for gather in gathers:
        assert facts is not None
        wiring = Wiring(model)
        order, name = channel_order(gather, wiring), gather.output[0]
        if order is None or name in wiring.outputs:
            continue
        shape = facts.shape(gather.input[0])
        if shape is None or not np.array_equal(np.sort(order), np.arange(shape[1] or 0)):
            continue
        chains = [wiring.reading(name, node) for node in wiring.readers[name]]
        if not all(chain is not None and wiring.taken(chain) == len(order) for chain in chains):
            continue
        back = np.argsort(order)  # position of each channel of x among those that were looked up
        moved = {name}
        for node, chain in zip(wiring.readers[name], chains, strict=True):
            assert chain is not None
            wiring.reorder_reading(chain, back)
            node.input[0] = gather.input[0]
            moved |= {step.output[0] for step in chain[:-1]}
        model.graph.node.remove(gather)
        forget(model, moved)
    drop_unused(model)
    return model


def channel_order(gather: Any, wiring: Wiring) -> np.ndarray | None:
    """Channels that a Gather looks up; None if it is no look-up of a list of known channels."""
    axis = next((attribute.i for attribute in gather.attribute if attribute.name == "axis"), 0)
    order = wiring.constant(gather.input[1])
    if axis != 1 or order is None or order.ndim != 1 or gather.input[0] in wiring.weights or (order < 0).any():
        return None
    return order
