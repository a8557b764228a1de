"""What can be said about the nodes of a graph without running it: shapes, types, constants, settings."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.optional_packages import needed

Shape = tuple[int | None, ...]  # None: free


class NodeFacts:
    def __init__(self, model: Any) -> None:
        onnx = needed("onnx")
        self._arrays = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            tensor = constant_tensor(node)
            if tensor is not None:
                self._arrays[node.output[0]] = tensor
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self._shapes: dict[str, Shape] = {}
        self._types: dict[str, int] = {}
        for value in (*inferred.input, *inferred.value_info, *inferred.output):
            tensor = value.type.tensor_type
            self._types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self._shapes[value.name] = tuple(
                    dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim
                )

    def is_constant(self, name: str) -> bool:
        return name in self._arrays

    def array(self, node: Any, place: int) -> np.ndarray | None:
        """A constant input of a node; None if there is no such input or it is computed."""
        name = node.input[place] if place < len(node.input) else ""
        return needed("onnx").numpy_helper.to_array(self._arrays[name]) if name in self._arrays else None

    def known(self, node: Any, place: int) -> bool:
        """Whether an input of a node is there and constant."""
        return place < len(node.input) and node.input[place] in self._arrays

    def is_external(self, name: str) -> bool:
        """Whether a constant lies in a second file."""
        return name in self._arrays and self._arrays[name].data_location == needed("onnx").TensorProto.EXTERNAL

    def given(self, node: Any, place: int) -> bool:
        return place < len(node.input) and bool(node.input[place])

    def shape(self, name: str) -> Shape | None:
        """None if it is not known."""
        return tuple(self._arrays[name].dims) if name in self._arrays else self._shapes.get(name)

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def type_of(self, name: str) -> str:
        """In NumPy's words; "unknown" if it is not known."""
        kind = self._arrays[name].data_type if name in self._arrays else self._types.get(name, 0)
        return str(needed("onnx").helper.tensor_dtype_to_np_dtype(kind)) if kind else "unknown"


def setting(node: Any, name: str, default: Any) -> Any:
    """An attribute of a node, as Python knows it."""
    for attribute in node.attribute:
        if attribute.name == name:
            value = needed("onnx").helper.get_attribute_value(attribute)
            return value.decode() if isinstance(value, bytes) else list(value) if isinstance(default, list) else value
    return default


def constant_tensor(node: Any) -> Any | None:
    """What a Constant node holds, as a TensorProto under the name of its output; None for other nodes, and for text."""
    if node.op_type != "Constant":
        return None
    onnx = needed("onnx")
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = node.output[0]
        return tensor
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in kinds:
        return None
    return onnx.numpy_helper.from_array(np.array(value, kinds[attribute.name]), node.output[0])
