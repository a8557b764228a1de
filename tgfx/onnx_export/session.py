"""ONNX Runtime on the CPU: the judge of every export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tgfx.errors import OnnxFileError
from tgfx.optional_packages import needed

Feeds = dict[str, np.ndarray]
ONLY_ERRORS = 3


def open_session(model: Any, *, threads: int = 1, optimise: bool = True) -> Any:
    """A session for a file's path or a model in memory. threads=0: all cores."""
    runtime = needed("onnxruntime", purpose="running ONNX")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ONLY_ERRORS
    if not optimise:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, str | Path) else model.SerializeToString()
    try:
        return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        double = "tensor(double)" in text or "NOT_IMPLEMENTED" in text
        raise OnnxFileError(
            "ONNX Runtime does not take the model",
            expected="a model that ONNX Runtime can load on the CPU",
            found=text,
            where=str(model) if isinstance(model, str | Path) else None,
            fix="float32 models run everywhere: model.float()" if double else None,
        ) from error


def run(session: Any, feeds: Feeds) -> dict[str, np.ndarray]:
    """Output name -> value; inputs that the graph does not read are left out."""
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    values = session.run(names, {name: value for name, value in feeds.items() if name in wanted})
    return dict(zip(names, values, strict=True))


def as_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()  # np.ascontiguousarray would give a single number an axis
