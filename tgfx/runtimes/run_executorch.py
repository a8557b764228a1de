"""ExecuTorch, from a program that the parent made of the module itself. Stands alone: see worker.py."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.runtime import Runtime

VERSION = version("executorch")
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]


def load(folder: Path, request: dict[str, Any]) -> Call:
    torch.set_num_threads(request["threads"])
    program = Runtime.get().load_program(folder / "model.pte")
    method = program.load_method("forward")

    def call(feeds: Arrays, _program: Any = program) -> Arrays:  # the method does not hold its program
        found = method.execute([torch.from_numpy(feeds[name]) for name in request["inputs"]])
        return {name: value.numpy() for name, value in zip(request["outputs"], found, strict=True)}

    return call
