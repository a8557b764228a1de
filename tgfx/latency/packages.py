"""The packages that measuring needs; everything else here works without them."""

from __future__ import annotations

from typing import Any

from tgfx.optional_packages import needed


def onnx() -> Any:
    needed("onnx.numpy_helper", purpose="measuring latency")
    return needed("onnx", purpose="measuring latency")


def onnxruntime() -> Any:
    return needed("onnxruntime", purpose="measuring latency")
