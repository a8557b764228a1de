"""The packages that measuring needs; everything else here works without them."""

from __future__ import annotations

import importlib
from typing import Any

from tgfx.errors import MissingPackageError


def onnx() -> Any:
    return _package("onnx", "numpy_helper")


def onnxruntime() -> Any:
    return _package("onnxruntime")


def _package(name: str, *submodules: str) -> Any:
    try:
        found = importlib.import_module(name)
        for submodule in submodules:
            importlib.import_module(f"{name}.{submodule}")
    except ImportError as error:
        raise MissingPackageError(
            f"measuring latency needs {name}", expected=name, found=str(error), fix="pip install tgfx[onnx]"
        ) from error
    return found
