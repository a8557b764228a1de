"""ONNX Runtime. Stands alone: see worker.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

VERSION = onnxruntime.__version__
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]


def load(folder: Path, request: dict[str, Any]) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request["threads"]
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / request["model"]), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}

    def call(feeds: Arrays) -> Arrays:
        given = {name: value for name, value in feeds.items() if name in wanted}
        return dict(zip(names, session.run(names, given), strict=True))

    return call
