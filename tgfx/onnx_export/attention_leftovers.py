"""What torch writes around an attention's softmax for masks that are not there.

Before:  m = Where(Expand(True), 0, -3e38);  s = Softmax(q k + m);  Where(IsNaN(s), 0, s)
After:   Softmax(q k)

The mask rules nothing out; the guard is for rows in which a mask of minus infinity rules out everything. Few runtimes
on phones know IsNaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.onnx_export.channel_chains import Wiring, drop_unused

MOVED = {"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}  # the same numbers
COMPUTED = {"Add", "Div", "Mul", "Sub"}


def drop_attention_leftovers(model: Any) -> Any:
    """In place."""
    if not any(node.op_type == "Softmax" for node in model.graph.node):
        return model
    for operator, rule in (("Add", _empty_mask), ("Where", _needless_guard)):
        wiring = Wiring(model)
        for node in [node for node in model.graph.node if node.op_type == operator]:
            kept = rule(node, wiring)
            if kept is not None and node.output[0] not in wiring.outputs:
                _read_instead(wiring.readers[node.output[0]], node.output[0], kept)
                model.graph.node.remove(node)
                wiring = Wiring(model)
        _drop_unread(model)
    drop_unused(model)
    return model


def _empty_mask(node: Any, wiring: Wiring) -> str | None:
    """The other operand of an addition of zero."""
    for kept, added in ((0, 1), (1, 0)):
        mask = wiring.producer.get(node.input[added])
        if mask is not None and mask.op_type == "Where" and _everywhere(node.input[added], wiring) == 0:
            return str(node.input[kept])
    return None


def _needless_guard(node: Any, wiring: Wiring) -> str | None:
    """The softmax itself, of numbers that are finite by construction."""
    softmax, test = wiring.producer.get(node.input[2]), wiring.producer.get(node.input[0])
    if softmax is None or test is None or softmax.op_type != "Softmax" or test.op_type != "IsNaN":
        return None
    if test.input[0] != softmax.output[0] or _everywhere(node.input[1], wiring) != 0:
        return None
    return str(softmax.output[0]) if _is_finite(softmax.input[0], wiring) else None


def _everywhere(name: str, wiring: Wiring) -> float | None:
    """The number that a value has in all its entries, whatever their shape; None if they may differ."""
    constant = wiring.constant(name)
    if constant is not None:
        first = constant.flat[0] if constant.size else None
        return float(first) if first is not None and (constant == first).all() else None
    node = wiring.producer.get(name)
    if node is not None and node.op_type in MOVED:
        return _everywhere(node.input[0], wiring)
    if node is not None and node.op_type == "Where":
        chosen = _everywhere(node.input[0], wiring)
        return None if chosen is None else _everywhere(node.input[1 if chosen else 2], wiring)
    return None


def _is_finite(name: str, wiring: Wiring) -> bool:
    """A product of matrices, and what is made of it with finite constants; the lowest float32 is finite too."""
    constant = wiring.constant(name)
    if constant is not None:
        return bool(np.isfinite(constant).all())
    node = wiring.producer.get(name)
    if node is None:
        return False  # the user's own mask may hold anything
    if node.op_type in ("MatMul", "Gemm"):
        return True
    if node.op_type in MOVED:
        return _is_finite(node.input[0], wiring)
    if node.op_type == "Where":
        return all(_is_finite(given, wiring) for given in node.input[1:])
    if node.op_type == "Div" and wiring.constant(node.input[1]) is None:
        return False
    return node.op_type in COMPUTED and all(_is_finite(given, wiring) for given in node.input)


def _read_instead(readers: list[Any], name: str, other: str) -> None:
    for reader in readers:
        for place, given in enumerate(reader.input):
            if given == name:
                reader.input[place] = other


def _drop_unread(model: Any) -> None:
    wiring = Wiring(model)
    unread = [
        node
        for node in model.graph.node
        if not any(name in wiring.outputs or wiring.readers[name] for name in node.output if name)
    ]
    for node in unread:
        model.graph.node.remove(node)
    if unread:
        _drop_unread(model)
