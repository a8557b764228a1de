"""A model given to a runtime in another process, and what came back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tgfx.onnx_export.session import Feeds

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class Answer:
    """Either outputs, or an error."""

    outputs: dict[str, np.ndarray]
    version: str = ""
    ms: float | None = None
    error: str = ""


def copy_of(model: Path, folder: Path) -> None:
    """The file (and weights beside it) where a converter may do with it what it likes."""
    shutil.copyfile(model, folder / "model.onnx")
    for weights in model.absolute().parent.glob(f"{model.name}.*.data"):
        shutil.copyfile(weights, folder / weights.name)


def ask(runtime: str, folder: Path, feeds: Feeds, outputs: Mapping[str, list[int]], seconds: float) -> Answer:
    """Run the worker in `folder`, which holds the model already."""
    request: dict[str, Any] = {
        "runtime": runtime,
        "model": "model.onnx",
        "inputs": {name: [list(value.shape), str(value.dtype)] for name, value in feeds.items()},
        "outputs": dict(outputs),
        "threads": 1,
        "seconds": seconds,
    }
    (folder / "request.json").write_text(json.dumps(request))
    np.savez(folder / "inputs.npz", **feeds)  # type: ignore[arg-type]
    try:
        done = subprocess.run(
            [sys.executable, str(WORKER), str(folder)], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Answer({}, error=f"no answer in {PATIENCE:.0f} seconds")
    last = (done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no message"])[-1]
    if not (folder / "result.json").is_file():
        return Answer({}, error=f"the process ended with code {done.returncode}: {last}")
    result = json.loads((folder / "result.json").read_text())
    if "error" in result:
        return Answer({}, error=f"{result['error']} ({last})")
    with np.load(folder / "outputs.npz") as stored:
        return Answer({name: stored[name] for name in stored.files}, result["version"], result["ms"])
