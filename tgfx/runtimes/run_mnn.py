"""MNN, through its converter's own library. Stands alone: see worker.py.

Never import MNN.tools and never run the mnnconvert command: both install a logging package into the user's Python and
report to the vendor. `_tools` is the bare converter.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _tools
import MNN.expr as expressions
import MNN.nn as nn
import numpy as np

VERSION = version("MNN")
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]
KINDS = {"f": expressions.float, "i": expressions.int, "b": expressions.int}


def load(folder: Path, request: dict[str, Any]) -> Call:
    converted = folder / "model.mnn"
    source = str(folder / request["model"])
    files = ["--modelFile", source, "--MNNModel", str(converted)]
    _tools.mnnconvert(["tgfx", "-f", "ONNX", *files, "--bizCode", "tgfx"])
    if not converted.is_file():
        raise RuntimeError("the converter wrote nothing")
    settings = {"backend": "CPU", "numThread": request["threads"], "precision": "high"}
    runtime = nn.create_runtime_manager((settings,))
    inputs, outputs = list(request["inputs"]), list(request["outputs"])
    net = nn.load_module_from_file(str(converted), inputs, outputs, runtime_manager=runtime)

    def call(feeds: Arrays) -> Arrays:
        given = []
        for name in inputs:
            value = feeds[name]
            value = value.astype(np.float32 if value.dtype.kind == "f" else np.int32)
            given.append(expressions.const(value, list(value.shape), expressions.NCHW, KINDS[value.dtype.kind]))
        found = net.forward(given)
        return {
            name: np.array(expressions.convert(value, expressions.NCHW).read())
            for name, value in zip(outputs, found, strict=True)
        }

    return call
