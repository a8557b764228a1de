"""(g) Memory of a training step with a gate for every weight, over one without, at the scale of VGG-16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.tables import Table, few_holes, met

TARGET = 2.0
STEPS = 2
LOSSES = {"default": f"budget_loss(params=0.1, steps={STEPS})", "paper": "budget_loss(params=0.1, weight=1)"}
RETURNED = 65_536  # bytes: the work on gates is done in blocks, whose ends are smaller than most tensors


def weight_memory() -> Table:
    plain, gates = _worker("plain")
    mib = 2**20
    rows, extra = [("plain", f"{plain / mib:.0f}", "-")], {}
    for rule, loss in LOSSES.items():
        peak, _ = _worker(rule)
        extra[rule] = (peak - plain) / gates
        rows.append((f"gated, {rule}'s rule, `{loss}`", f"{peak / mib:.0f}", f"{extra[rule]:.3f}"))
    return Table(
        "Memory of weight gates",
        f"torchvision's vgg16, batch 1, {STEPS} steps of SGD: "
        f"largest resident size of a process, holes in the heap kept small "
        f"(`MALLOC_MMAP_THRESHOLD_={RETURNED}`). The gates themselves take {gates / mib:.0f} MiB.",
        ("model", "peak, MiB", "more than plain, in sizes of the gates"),
        rows,
        f"Extra memory by the default rule {extra['default']:.3f} times the gates, which is the gates and the "
        f"gradient of one layer's at a time (target at most {TARGET}: {met(extra['default'] <= TARGET)}); by "
        f"the paper's {extra['paper']:.3f} times, which is the gates and their gradients.",
    )


def _worker(kind: str) -> tuple[int, int]:
    """(peak bytes, bytes of all gated weights), in a process of its own."""
    command = [sys.executable, "-m", "examples.benchmarks.weight_memory", kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=few_holes(RETURNED))
    peak, gates = done.stdout.split()[-2:]
    return int(peak), int(gates)


def _measure(kind: str) -> None:
    from examples.zoo.loading import models

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _load_libraries()
    model: Any = models()["torchvision/vgg16"]()[0]
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.ndim > 1)
    example = torch.randn(1, 3, 224, 224)
    if kind != "plain":
        ungated, model = model, tgfx.transform(model, example, granularity="weight")
        del ungated
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(example), torch.tensor([0]))
        if kind != "plain":
            loss = loss + _budget_loss(model, kind)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    print(peak * 1024, weights)


def _budget_loss(gated: tgfx.GatedModule, rule: str) -> torch.Tensor:
    if rule == "paper":
        return gated.budget_loss(params=0.1, weight=1.0)
    return gated.budget_loss(params=0.1, steps=STEPS)


def _load_libraries() -> None:
    """Gate and train a small net of the same layers, so that both processes hold the same code and tables."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 2),
    )  # fmt: skip
    x = torch.randn(1, 3, 16, 16)
    gated = tgfx.transform(net, x, granularity="weight").train()
    for rule in LOSSES:
        (gated(x).sum() + _budget_loss(gated, rule)).backward()
        torch.optim.SGD(gated.parameters(), lr=1e-3).step()


if __name__ == "__main__":
    _measure(sys.argv[1])
