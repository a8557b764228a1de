"""OpenVINO on the CPU, in float32 (some processors would otherwise take bfloat16). Stands alone: see worker.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino

VERSION = openvino.__version__.split("-")[0]
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]


def load(folder: Path, request: dict[str, Any]) -> Call:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": request["threads"]}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(folder / request["model"]), "CPU", settings)
    known = {value.any_name for value in compiled.inputs}

    def call(feeds: Arrays) -> Arrays:
        found = compiled({name: value for name, value in feeds.items() if name in known})
        return {name: found[output] for name, output in zip(request["outputs"], compiled.outputs, strict=True)}

    return call
