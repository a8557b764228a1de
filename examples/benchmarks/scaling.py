"""(h) Two processes over one: how much faster DDP trains the plain and the gated model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tgfx
from examples.benchmarks.resnet56 import resnet56
from examples.benchmarks.tables import Table
from examples.distributed.ranks import process_group

BATCH, STEPS = 64, 6


def scaling() -> Table:
    rows, gains = [], {}
    for kind in ("plain", "gated"):
        one, two = (_throughput(kind, processes) for processes in (1, 2))
        gains[kind] = two / one
        rows.append((kind, f"{one:.1f}", f"{two:.1f}", f"{gains[kind]:.2f}"))
        print(*rows[-1], sep="\t", flush=True)
    return Table(
        "Two processes",
        f"ResNet-56, batch {BATCH} per process, one thread each, gloo on one machine of two cores; samples a second of "
        f"wall time over {STEPS} steps. gated: with `budget_loss(flops=0.5)`.",
        ("model", "1 process, samples/s", "2 processes, samples/s", "gain"),
        rows,
        f"Gain {gains['gated']:.2f} with gates, {gains['plain']:.2f} without.",
    )


def _throughput(kind: str, processes: int) -> float:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, "-m", "examples.benchmarks.scaling", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("rate")).split()[1])


def _measure(kind: str) -> None:
    torch.manual_seed(0)
    inner: Any = resnet56()
    if kind == "gated":
        inner = tgfx.transform(inner, torch.randn(1, 3, 32, 32))
    inner.train()
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    start = 0.0
    for step in range(STEPS + 1):
        if step == 1:  # the first makes the optimizer's state
            dist.barrier()
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        if kind == "gated":
            loss = loss + inner.budget_loss(flops=0.5)
        loss.backward()
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print("rate", STEPS * BATCH * dist.get_world_size() / (time.perf_counter() - start))


if __name__ == "__main__":
    with process_group():
        _measure(sys.argv[1])
