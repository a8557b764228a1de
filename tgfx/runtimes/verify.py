"""One ONNX file in every runtime at hand: does it load, does it agree, how fast is it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tgfx.errors import InputError, MissingPackageError, OnnxFileError
from tgfx.onnx_export.files import random_feeds, read_model
from tgfx.onnx_export.graph_size import graph_size
from tgfx.onnx_export.parity import APART, delta
from tgfx.onnx_export.session import Feeds, as_numpy, open_session, run
from tgfx.onnx_export.subject import Subject, run_torch, subject_of
from tgfx.runtimes.executorch_program import write_program
from tgfx.runtimes.isolation import Answer, ask, copy_of
from tgfx.runtimes.results import RuntimeResult, VerifyReport

# name -> modules that must be importable; the extra of tgfx has the runtime's name
RUNTIMES = {
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "mnn": ("MNN",),
    "ncnn": ("ncnn", "pnnx"),
    "executorch": ("executorch",),
}
TOLERANCE = 1e-3  # of the largest entry: other kernels than torch's, Winograd among them
ROUGH = 0.05  # where numbers are float16 or int8: one step of the grid
SECONDS = 0.5
OWN_THREADS = {"executorch": "with as many threads as it likes"}  # its thread pool cannot be set from Python


def verify_onnx(
    path: str | os.PathLike[str],
    module: nn.Module | None = None,
    *,
    runtimes: Iterable[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
    batch: int | None = None,
    tolerance: float | None = None,
    measure: bool = True,
) -> VerifyReport:
    """Run a file in onnxruntime, openvino, MNN, ncnn and, where its `module` is given, ExecuTorch.

    Compared with the module in torch, or else with ONNX Runtime without optimisations. `runtimes` left out means all
    that are installed, with a warning about the others; named ones must be there. inputs: by name, else random numbers
    at the file's shapes; sizes: of free axes by their names. Nothing is written beside the file.
    """
    file, model = Path(path), read_model(path)
    chosen = _chosen(runtimes)
    feeds = _feeds(model, inputs, sizes, batch)
    subject = None if module is None else subject_of(module, tuple(map(torch.from_numpy, feeds.values())), None)
    expected = _expected(file, subject, feeds)
    if tolerance is None:
        tolerance = ROUGH if _is_rough(model) else TOLERANCE
    results = [
        _try(name, file, subject, feeds, expected, tolerance, SECONDS if measure else 0.0) if not missing
        else RuntimeResult(name, "skipped", reason=missing)
        for name, missing in _availability(chosen, subject).items()
    ]  # fmt: skip
    skipped = [f"{result.runtime} ({result.reason})" for result in results if result.status == "skipped"]
    if skipped:
        warnings.warn("not tried: " + "; ".join(skipped), stacklevel=2)
    reference = "torch" if subject is not None else "ONNX Runtime without optimisations"
    return VerifyReport(file, reference, {k: list(v.shape) for k, v in feeds.items()}, tolerance, results)


def _chosen(runtimes: Iterable[str] | None) -> list[str]:
    if runtimes is None:
        return list(RUNTIMES)
    names = [runtimes] if isinstance(runtimes, str) else list(runtimes)
    for name in names:
        if name not in RUNTIMES:
            raise InputError("unknown runtime", expected=", ".join(RUNTIMES), found=repr(name))
        missing = missing_packages(name)
        if missing:
            raise MissingPackageError(
                f"{name} is not installed",
                expected=", ".join(RUNTIMES[name]),
                found=f"no {', '.join(missing)}",
                fix=f"pip install --no-deps {' '.join(missing)} (tgfx[{name}] names them; some of them pull torch)",
            )
    return names


def missing_packages(name: str) -> list[str]:
    return [package for package in RUNTIMES[name] if importlib.util.find_spec(package) is None]


def _availability(chosen: list[str], subject: Subject | None) -> dict[str, str]:
    """Runtime -> why it cannot be tried, empty if it can."""
    reasons = {}
    for name in chosen:
        missing = missing_packages(name)
        reasons[name] = f"no {', '.join(missing)} installed" if missing else ""
        if name == "executorch" and not missing and subject is None:
            reasons[name] = "takes the module, not the file"
    return reasons


def _feeds(model: Any, inputs: Mapping[str, Any] | None, sizes: Mapping[str, int] | None, batch: int | None) -> Feeds:
    feeds = random_feeds(model, sizes, batch)
    if inputs is None:
        return feeds
    if set(inputs) != set(feeds):
        raise InputError("inputs do not fit the file", expected=", ".join(feeds), found=", ".join(inputs) or "nothing")
    given = {name: as_numpy(v) if isinstance(v, torch.Tensor) else np.asarray(v) for name, v in inputs.items()}
    return {name: given[name] for name in feeds}


def _expected(file: Path, subject: Subject | None, feeds: Feeds) -> dict[str, np.ndarray]:
    if subject is not None:
        named = run_torch(subject, subject.args, subject.kwargs)
        return {name: as_numpy(tensor) for name, tensor in named.items()}
    session = open_session(file, optimise=False)
    try:
        return run(session, feeds)
    except Exception as error:
        raise OnnxFileError(
            "the model does not run",
            expected="inputs " + ", ".join(f"{name} {value.shape}" for name, value in feeds.items()),
            found=(str(error).strip().splitlines() or [""])[0],
            where=str(file),
            fix="give inputs=, or sizes= for free axes",
        ) from error


def _is_rough(model: Any) -> bool:
    half = any(tensor.data_type in (10, 16) for tensor in model.graph.initializer)  # float16, bfloat16
    return half or "DequantizeLinear" in graph_size(model).ops


def _try(
    name: str,
    file: Path,
    subject: Subject | None,
    feeds: Feeds,
    expected: dict[str, np.ndarray],
    tolerance: float,
    seconds: float,
) -> RuntimeResult:
    with tempfile.TemporaryDirectory(prefix="tgfx-") as place:
        folder = Path(place)
        copy_of(file, folder)
        if name == "executorch" and subject is not None:
            try:
                write_program(subject, subject.args, folder / "model.pte")
            except Exception as error:
                line = (str(error).strip().splitlines() or [""])[0]
                return RuntimeResult(name, "failed", reason=f"{type(error).__name__}: {line}")
        shapes = {output: list(value.shape) for output, value in expected.items()}
        return _judged(name, ask(name, folder, feeds, shapes, seconds), expected, tolerance)


def _judged(name: str, answer: Answer, expected: dict[str, np.ndarray], tolerance: float) -> RuntimeResult:
    if answer.error:
        return RuntimeResult(name, "failed", answer.version, reason=answer.error)
    gaps = {
        output: delta(value, answer.outputs[output]) if output in answer.outputs else APART
        for output, value in expected.items()
    }
    worst = max(gaps, key=lambda output: gaps[output].relative)
    agrees = gaps[worst].within(tolerance)
    return RuntimeResult(
        name,
        "ok" if agrees else "differs",
        answer.version,
        max(gap.largest for gap in gaps.values()),
        gaps[worst].relative,
        answer.ms,
        OWN_THREADS.get(name, "") if agrees else f"{worst} is off by {gaps[worst].relative:.2g} of its largest entry",
    )
