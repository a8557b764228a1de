"""(a) Time of tgfx.transform over Torch-Pruning's: graph build plus pruner construction."""

from __future__ import annotations

import gc
import json
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from examples.benchmarks.tables import Table, cpu_seconds, met

LIMIT = 60  # seconds for either tool on one model
SLOWEST = 15  # seconds that tgfx may take on any torchvision model
REPEATS = 5
MODELS = (
    *("alexnet", "vgg16_bn", "resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2"),
    *("densenet121", "densenet201", "googlenet", "inception_v3", "squeezenet1_1", "shufflenet_v2_x1_0"),
    *(
        "mobilenet_v2",
        "mobilenet_v3_large",
        "mnasnet1_0",
        "efficientnet_b0",
        "efficientnet_b7",
        "regnet_y_400mf",
    ),
    *("regnet_x_8gf", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_b", "maxvit_t"),
    *("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"),
)


def transform_time(models: tuple[str, ...] = MODELS) -> Table:
    rows, ratios, slowest = [], [], (0.0, "")
    for name in models:
        ours, theirs, note = _measure(name)
        if ours:
            slowest = max(slowest, (statistics.median(ours), name))
        if note.startswith("Torch-Pruning not done"):
            ratios.append(statistics.median(ours) / LIMIT)  # at most that: it was stopped
            note = f"below {ratios[-1]:.2f}: {note}"
        elif ours and theirs:
            ratios.append(statistics.median(a / b for a, b in zip(ours, theirs, strict=False)))
            note = f"{ratios[-1]:.2f}"
        rows.append((name, _median(ours), _median(theirs), note))
        print(*rows[-1], sep="\t", flush=True)
    middle = statistics.median(ratios)
    return Table(
        "Transform time",
        f"`tgfx.transform` against Torch-Pruning {version('torch-pruning')}'s `MagnitudePruner(...)`, whose "
        "constructor builds the dependency graph and walks its groups. Processor seconds on one thread, "
        f"median of {REPEATS} after one that is not counted, taking turns in one process per model, garbage collected "
        f"in between; each is stopped after {LIMIT} s, and counts with these where it is Torch-Pruning.",
        ("model", "tgfx, s", "Torch-Pruning, s", "ratio"),
        rows,
        f"Median ratio {middle:.2f} over {len(ratios)} models (target at most 1: {met(middle <= 1)}); "
        f"slowest {slowest[1]} with {slowest[0]:.1f} s (target at most {SLOWEST} s: "
        f"{met(slowest[0] <= SLOWEST)}).",
    )


def _measure(name: str) -> tuple[list[float], list[float], str]:
    """In a process of its own: a grouping that does not finish can be stopped."""
    command = [sys.executable, "-m", "examples.benchmarks.transform_time", name]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, list[float]] = {"tgfx": [], "torch-pruning": []}
    note = ""
    for line in done.stdout.splitlines():
        entry = json.loads(line)
        if "error" in entry:
            note = f"{entry['tool']}: {entry['error']}"
        else:
            found[entry["tool"]].append(entry["seconds"])
    if done.returncode == -signal.SIGXCPU:
        slow = "tgfx" if len(found["tgfx"]) == len(found["torch-pruning"]) else "Torch-Pruning"
        note = f"{slow} not done in {LIMIT} s"
    elif done.returncode:
        note = (done.stderr.strip().splitlines() or ["died"])[-1][:80]
    ours, theirs = (seconds[1:] or seconds for seconds in found.values())  # the first call imports
    return ours, theirs, note


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _worker(name: str) -> Iterator[dict[str, Any]]:
    import torch

    import tgfx
    from examples.zoo.loading import models

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    build = models()[f"torchvision/{name}"]
    _, example = build()
    tools = {"tgfx": tgfx.transform, "torch-pruning": _torch_pruning}
    for _ in range(1 + REPEATS):
        fresh = build()[0].eval()
        for tool, call in list(tools.items()):
            gc.collect()  # what one tool leaves behind is not to be collected in the time of the other
            try:
                with _processor_time(LIMIT):
                    seconds = cpu_seconds(lambda call=call, fresh=fresh: call(fresh, example))
            except Exception as error:
                yield {"tool": tool, "error": type(error).__name__}
                del tools[tool]
            else:
                yield {"tool": tool, "seconds": seconds}


@contextmanager
def _processor_time(seconds: int) -> Iterator[None]:
    """The kernel ends this process (SIGXCPU) when it has used so much more; others' time does not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _torch_pruning(model: Any, example: Any) -> None:
    import torch
    import torch_pruning as tp

    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    importance = tp.importance.MagnitudeImportance(p=2)
    tp.pruner.MagnitudePruner(model, example, importance=importance, pruning_ratio=0.5, ignored_layers=[layers[-1]])


if __name__ == "__main__":
    for entry in _worker(sys.argv[1]):
        print(json.dumps(entry), flush=True)
