"""ncnn, converted by pnnx. Stands alone: see worker.py. ncnn has no batch dimension: rows go through one by one."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ncnn
import numpy as np
import pnnx

VERSION = ncnn.__version__
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]
KINDS = {"float32": "f32", "float16": "f16", "int64": "i64", "int32": "i32"}


def load(folder: Path, request: dict[str, Any]) -> Call:
    for name, (_, kind) in request["inputs"].items():
        if kind not in KINDS:
            raise RuntimeError(f"pnnx takes no input of type {kind}: {name}")
    shapes = [
        f"[{','.join(str(size) for size in [1, *shape[1:]])}]{KINDS[kind]}"
        for shape, kind in request["inputs"].values()
    ]
    command = [pnnx.EXEC_PATH, request["model"], f"inputshape={','.join(shapes)}", "fp16=0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    parameters = (folder / request["model"]).with_suffix(".ncnn.param")
    if not parameters.is_file():
        raise RuntimeError(f"pnnx wrote nothing: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    net = ncnn.Net()
    for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, option, False)
    net.opt.num_threads = request["threads"]
    if net.load_param(str(parameters)) or net.load_model(str(parameters.with_suffix(".bin"))):
        raise RuntimeError("ncnn cannot load what pnnx wrote: a layer it does not have")

    def one(feeds: Arrays, row: int) -> list[np.ndarray]:
        extractor = net.create_extractor()
        kept = []  # a Mat is a view: what it looks at must live until the run is over
        for place, name in enumerate(request["inputs"]):
            value = np.ascontiguousarray(feeds[name][row])
            value = value.astype(np.float32) if value.dtype.kind == "f" else value.astype(np.int32)
            kept += [value, ncnn.Mat(value)]
            extractor.input(f"in{place}", kept[-1])
        found = []
        for place, name in enumerate(request["outputs"]):
            failed, value = extractor.extract(f"out{place}")
            if failed:
                raise RuntimeError(f"ncnn cannot compute {name}")
            shape = request["outputs"][name][1:]
            value = np.array(value)
            if value.size != np.prod(shape, dtype=int):
                raise RuntimeError(f"{name} has shape {value.shape} in ncnn, expected {tuple(shape)}")
            found.append(value.reshape(shape))
        return found

    def call(feeds: Arrays) -> Arrays:
        rows = [one(feeds, row) for row in range(len(next(iter(feeds.values()))))]
        return {
            name: np.stack(values) for name, values in zip(request["outputs"], zip(*rows, strict=True), strict=True)
        }

    return call
