"""Arithmetic of an ONNX graph: 2 x multiply-adds of convolutions and matrix products, for one sample."""

from __future__ import annotations

from math import prod
from typing import Any

from tgfx.onnx_export.files import input_shapes
from tgfx.optional_packages import needed

COUNTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def flops(model: Any, sizes: dict[str, int] | None = None) -> int | None:
    """At batch 1; None where a shape cannot be inferred. Products of two activations (attention) count too."""
    onnx = needed("onnx", purpose="counting FLOPs")
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    batch = _batch(fixed)
    shapes = input_shapes(fixed, sizes, batch=1)
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, []), strict=False):
            dim.dim_value = size
    inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    known = {tensor.name: list(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        if all(dim.dim_value for dim in dims):
            known.setdefault(value.name, [dim.dim_value for dim in dims])
    total = 0
    for node in inferred.node:
        if node.op_type not in COUNTED:
            continue
        if any(name not in known for name in (*node.input[:2], node.output[0])):
            return None
        total += _cost(node, known)
    return total // batch


def _batch(model: Any) -> int:
    """What a fixed batch divides the count by; a free one is set to 1."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    return dims[0].dim_value or 1 if dims else 1


def _cost(node: Any, known: dict[str, list[int]]) -> int:
    left, right, out = known[node.input[0]], known[node.input[1]], known[node.output[0]]
    if node.op_type == "Conv":
        return 2 * prod(out) * prod(right[1:])
    if node.op_type == "ConvTranspose":
        return 2 * prod(left) * prod(right[1:])
    if node.op_type == "Gemm":
        transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return 2 * prod(out) * left[0 if transposed else 1]
    return 2 * prod(out) * left[-1]
