"""(b) A training step with gates over one without: time and peak memory."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import resnet56
from examples.benchmarks.tables import Table, cpu_seconds, few_holes, met

TARGET = 1.03
KINDS = ("plain", "gated")
REPEATS = 3  # a process's resident size varies by some percent
PROCESSES = 6  # as its time does, with where its tensors happen to lie; every other one builds the gated model first
# glibc: nothing below 32 MiB (its limit) is mapped apart, and freed memory stays with the process
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}
# name -> (batch, image size, rounds)
SETTINGS = {"resnet56": (128, 32, 12), "resnet50": (8, 224, 8)}


def training_step(rounds: int | None = None) -> Table:
    rows, worst_time, worst_memory = [], 0.0, 0.0
    for name, (batch, size, usual) in SETTINGS.items():
        # memory first: the processes that measure it start from a small one
        peaks = [[_peak_memory(name, kind) for kind in KINDS] for _ in range(REPEATS)]
        plain, gated = (statistics.median(column) for column in zip(*peaks, strict=True))
        runs = [_times(name, rounds or usual, first) for _ in range(PROCESSES // 2) for first in KINDS]
        ratios = sorted(a / b for times in runs for a, b in zip(times["gated"], times["plain"], strict=True))
        slower, noise = statistics.median(ratios), _middle_half(ratios)
        worst_time, worst_memory = max(worst_time, slower), max(worst_memory, gated / plain)
        seconds = f"{statistics.median(seconds for times in runs for seconds in times['plain']):.2f}"
        memory = (f"{plain / 1024:.0f}", f"{gated / plain:.3f}")
        rows.append((f"{name}, batch {batch}, {size}x{size}", seconds, f"{slower:.3f}", noise, *memory))
        print(*rows[-1], sep="\t", flush=True)
    return Table(
        "Training step",
        "Forward, backward and SGD step of the gated model with `budget_loss(flops=0.5)` over the plain model. "
        "Time: processor seconds on one thread, the two taking turns; the median of all pairs of steps in "
        f"{PROCESSES} processes (half of them build the gated model first), and their middle half beside it. "
        "Freed memory is kept by the process, so that no step pays for pages that another gave back. Memory: largest "
        f"resident size of a process that makes the model, gates it or not, takes three steps (median of {REPEATS}); "
        "both load the same libraries, and holes in the heap are kept small (`MALLOC_MMAP_THRESHOLD_`).",
        ("model", "plain step, s", "time ratio", "middle half", "plain peak, MiB", "memory ratio"),
        rows,
        f"Largest time ratio {worst_time:.3f} (target at most {TARGET}: {met(worst_time <= TARGET)}); "
        f"largest memory ratio {worst_memory:.3f} (target at most {TARGET}: {met(worst_memory <= TARGET)}).",
    )


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet56":
        return resnet56()
    from examples.zoo.loading import models

    return models()["torchvision/resnet50"]()[0]


def _step(name: str, kind: str) -> Callable[[], None]:
    batch, size, _ = SETTINGS[name]
    model: Any = _build(name)
    if kind == "gated":
        model = tgfx.transform(model, torch.randn(1, 3, size, size))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images, labels = _batch(batch, size)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        if kind == "gated":
            loss = loss + model.budget_loss(flops=0.5)
        loss.backward()
        optimizer.step()

    return step


def _batch(batch: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(10, (batch,), generator=generator)


def _middle_half(ratios: list[float]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.3f} to {high:.3f}"


def _alternate(name: str, rounds: int, first: str) -> dict[str, list[float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = {kind: _step(name, kind) for kind in sorted(KINDS, key=lambda kind: kind != first)}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        order = KINDS if turn % 2 else KINDS[::-1]  # nobody always goes first
        for kind in order:
            seconds = cpu_seconds(steps[kind])
            if turn:  # the first turn makes the optimizer's state
                times[kind].append(seconds)
    torch.set_num_threads(threads)
    return times


def _times(name: str, rounds: int, first: str) -> dict[str, list[float]]:
    """In a process of its own."""
    command = [sys.executable, "-m", "examples.benchmarks.training_step", name, "time", str(rounds), first]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **KEPT_HEAP})
    return json.loads(done.stdout.splitlines()[-1])


def _peak_memory(name: str, kind: str) -> int:
    """KiB"""
    command = [sys.executable, "-m", "examples.benchmarks.training_step", name, kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=few_holes())
    return int(done.stdout.split()[-1])


def _memory_worker(name: str, kind: str) -> int:
    torch.set_num_threads(1)
    tgfx.transform(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))  # both load the same libraries
    step = _step(name, kind)
    for _ in range(3):
        step()
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a child starts at its parent's, VmHWM is its own
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    if sys.argv[2] == "time":
        print(json.dumps(_alternate(sys.argv[1], int(sys.argv[3]), sys.argv[4])))
    else:
        print(_memory_worker(*sys.argv[1:3]))
