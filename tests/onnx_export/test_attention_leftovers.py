"""Masks that rule nothing out, and guards that guard nothing, are not in the file; those that do something are."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from tgfx.onnx_export.attention_leftovers import drop_attention_leftovers

LOWEST = float(np.finfo(np.float32).min)


def attention(mask: str, low: float = LOWEST) -> Any:
    """softmax(x y + m) with torch's guard; mask: "none", "all" (lets everything through), "some", "given"."""
    allowed = np.array([[True, False, True]]) if mask == "some" else np.array([[True]])
    weights = [
        numpy_helper.from_array(allowed, "allowed"),
        numpy_helper.from_array(np.array([3, 3]), "shape"),
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.float32(low), "low"),
    ]
    nodes = [helper.make_node("MatMul", ["x", "y"], ["z"])]
    if mask in ("all", "some"):
        nodes.append(helper.make_node("Expand", ["allowed", "shape"], ["wide"]))
        nodes.append(helper.make_node("Where", ["wide", "zero", "low"], ["m"]))
    scores = "z"
    if mask != "none":
        nodes.append(helper.make_node("Add", ["z", "m"], ["masked"]))
        scores = "masked"
    nodes += [
        helper.make_node("Softmax", [scores], ["s"], axis=-1),
        helper.make_node("IsNaN", ["s"], ["bad"]),
        helper.make_node("Where", ["bad", "zero", "s"], ["guarded"]),
        helper.make_node("Relu", ["guarded"], ["out"]),
    ]
    names = ["x", "y", *(["m"] if mask == "given" else [])]
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 3]) for name in names]
    output = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [3, 3])
    graph = helper.make_graph(nodes, "attention", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def answer(model: Any, seed: int = 0) -> np.ndarray:
    dice = np.random.default_rng(seed)
    feeds = {value.name: dice.standard_normal((3, 3)).astype(np.float32) for value in model.graph.input}
    if "m" in feeds:
        feeds["m"] = np.array([[0, 0, 0], [-np.inf] * 3, [0, -np.inf, 0]], np.float32)
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return found


@pytest.mark.parametrize(
    ("mask", "low", "left"),
    [
        ("none", LOWEST, {"MatMul", "Softmax", "Relu"}),
        ("all", LOWEST, {"MatMul", "Softmax", "Relu"}),
        ("all", -np.inf, {"MatMul", "Softmax", "Relu"}),
        ("some", LOWEST, {"MatMul", "Softmax", "Relu", "Add", "Where", "Expand"}),
        ("some", -np.inf, {"MatMul", "Softmax", "Relu", "Add", "Where", "Expand", "IsNaN"}),
        ("given", LOWEST, {"MatMul", "Softmax", "Relu", "Add", "Where", "IsNaN"}),
    ],
)
def test_only_what_does_nothing_goes(mask: str, low: float, left: set[str]) -> None:
    before, after = attention(mask, low), drop_attention_leftovers(attention(mask, low))
    onnx.checker.check_model(after, full_check=True)
    assert {node.op_type for node in after.graph.node} == left
    assert np.array_equal(answer(before), answer(after))
