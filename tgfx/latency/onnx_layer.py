"""One layer as an ONNX model, in the company it has in a network.

    x -> Conv 1x1 (1 channel to i) -> the layer (i to o) -> MaxPool of one pixel

A runtime may keep activations in blocks of channels and convert them where a model begins and ends. Alone, a layer
would pay for both conversions; between two others it pays for them only where its channel counts force it to. The time
of the layer is that of this model less that of the same model without it (`around`). A layer that does little work
is there several times (`copies`), side by side with different weights, so that it is not lost beside the others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tgfx.errors import InputError
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency.packages import onnx

OPSET, IR_VERSION = 18, 10
WRITING = 8  # multiply-adds that take about as long as writing a number: the work of the convolution in front
MOST = 4


def copies(shape: LayerShape, channels_in: int, channels_out: int) -> int:
    """How often the layer is there: enough to be twice the work of what is in front of it, if 4 are."""
    if shape.op == "linear":
        return 1
    before = WRITING * channels_in * math.prod(shape.space)
    places = [
        size if shape.op == "conv_transpose" else size / step
        for size, step in zip(shape.space, shape.stride, strict=True)
    ]
    groups = shape.groups_with(channels_in)
    own = math.prod(shape.kernel) * channels_in * channels_out / groups * math.prod(places)
    return min(MOST, max(1, math.ceil(2 * before / own)))


def layer_model(shape: LayerShape, channels_in: int, channels_out: int) -> bytes:
    """The layer with these numbers of channels, `copies` times."""
    _check(shape)
    if shape.op == "linear":
        return _linear(shape, channels_in, channels_out)
    build = _Builder()
    x = build.conv("x", (channels_in, 1, *(1 for _ in shape.space)))
    count = copies(shape, channels_in, channels_out)
    ends = [build.pixel(build.layer(x, shape, channels_in, channels_out), shape) for _ in range(count)]
    return build.model(ends, (shape.batch, 1, *shape.space))


def around(shape: LayerShape, channels_in: int) -> bytes:
    """The same without the layer."""
    if shape.op == "linear":
        return empty_model((shape.batch, channels_in))
    build = _Builder()
    x = build.conv("x", (channels_in, 1, *(1 for _ in shape.space)))
    return build.model([build.pixel(x, shape)], (shape.batch, 1, *shape.space))


def bare_model(shape: LayerShape, channels_in: int, channels_out: int) -> bytes:
    """The layer alone, for runtimes that are timed by hand."""
    _check(shape)
    if shape.op == "linear":
        return _linear(shape, channels_in, channels_out)
    build = _Builder()
    return build.model([build.layer("x", shape, channels_in, channels_out)], (shape.batch, channels_in, *shape.space))


def reference_model() -> bytes:
    """A convolution of some tenths of a millisecond, in whole blocks."""
    window = LayerShape("conv", 32, 32, 1, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1))
    return bare_model(window, 32, 32)


def empty_model(size: tuple[int, ...]) -> bytes:
    """What a call costs that does nothing."""
    build = _Builder()
    build.nodes.append(onnx().helper.make_node("Identity", ["x"], ["y"]))
    return build.model(["y"], size)


def _linear(shape: LayerShape, channels_in: int, channels_out: int) -> bytes:
    build = _Builder()
    weight, bias = build.random((channels_in, channels_out)), build.random((channels_out,))
    build.nodes.append(onnx().helper.make_node("Gemm", ["x", weight, bias], ["y"]))
    return build.model(["y"], (shape.batch, channels_in))


def _check(shape: LayerShape) -> None:
    if shape.dtype != "float32":
        raise InputError(
            "only float32 layers are timed here",
            expected="a model and an example in float32",
            found=shape.dtype,
            where=str(shape),
            fix="tgfx.transform the float32 model, or bring a table of your own (device_table=...)",
        )


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(0)

    def random(self, size: tuple[int, ...]) -> str:
        name = f"w{len(self.weights)}"
        values = self._random.standard_normal(size, dtype=np.float32) * np.float32(0.1)
        self.weights.append(onnx().numpy_helper.from_array(values, name))
        return name

    def _add(self, op: str, inputs: list[str], **attributes: Any) -> str:
        output = f"y{len(self.nodes)}"
        self.nodes.append(onnx().helper.make_node(op, inputs, [output], **attributes))
        return output

    def conv(self, x: str, size: tuple[int, ...]) -> str:
        return self._add("Conv", [x, self.random(size), self.random(size[:1])], kernel_shape=list(size[2:]))

    def layer(self, x: str, shape: LayerShape, channels_in: int, channels_out: int) -> str:
        groups = shape.groups_with(channels_in)
        attributes: dict[str, Any] = {
            "kernel_shape": list(shape.kernel),
            "strides": list(shape.stride),
            "pads": list(shape.padding) * 2,
            "dilations": list(shape.dilation),
            "group": groups,
        }
        if shape.op == "conv_transpose":
            weight = self.random((channels_in, channels_out // groups, *shape.kernel))
            attributes["output_padding"] = list(shape.output_padding)
        else:
            weight = self.random((channels_out, channels_in // groups, *shape.kernel))
        op = {"conv": "Conv", "conv_transpose": "ConvTranspose"}[shape.op]
        return self._add(op, [x, weight, self.random((channels_out,))], **attributes)

    def pixel(self, x: str, shape: LayerShape) -> str:
        """One pixel of every channel: reads the layout it is given, and does next to nothing."""
        far = [4 * (size + 1) * (1 + max(shape.stride)) for size in shape.space]  # more than any output is wide
        return self._add("MaxPool", [x], kernel_shape=[1 for _ in shape.space], strides=far)

    def model(self, outputs: list[str], size: tuple[int, ...]) -> bytes:
        helper = onnx().helper
        x = helper.make_tensor_value_info("x", onnx().TensorProto.FLOAT, list(size))
        ends = [helper.make_tensor_value_info(name, onnx().TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "layer", [x], ends, self.weights)
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION).SerializeToString()
