"""Tries a model in one runtime, in a process of its own: a converter may crash, exit or write to the terminal.

    python worker.py FOLDER

FOLDER holds request.json, inputs.npz and the model; outputs.npz and result.json are written there. This file and the
run_*.py next to it import nothing of tgfx, so that the process starts quickly and has nothing but the runtime in it.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP, LEAST, MOST = 3, 5, 200


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    try:
        runner = importlib.import_module(f"run_{request['runtime']}")
        result = attempt(runner, folder, request)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        result = {"error": f"{type(error).__name__}: {text[0]}"}
    (folder / "result.json").write_text(json.dumps(result))


def attempt(runner: Any, folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    with np.load(folder / "inputs.npz") as stored:
        feeds = {name: stored[name] for name in request["inputs"]}
    call = runner.load(folder, request)
    np.savez(folder / "outputs.npz", **call(feeds))
    return {"version": runner.VERSION, "ms": milliseconds(lambda: call(feeds), request["seconds"])}


def milliseconds(call: Callable[[], object], seconds: float) -> float | None:
    """Median of one call; None if nobody asked."""
    if not seconds:
        return None
    taken: list[float] = []
    start = time.perf_counter()
    for turn in range(WARM_UP + MOST):
        if turn >= WARM_UP + LEAST and time.perf_counter() - start > seconds:
            break
        began = time.perf_counter()
        call()
        if turn >= WARM_UP:
            taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
