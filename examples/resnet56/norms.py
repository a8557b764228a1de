"""Batch norm recalibrated in full: not its statistics alone, but its scale and shift too. All other weights stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import tgfx
from examples.resnet56.losses import Step

LR = 3e-3
WARM = 10  # steps in which the rate rises: a trained net is soon led away from where it is


def train_norms_(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step,
    *,
    steps: int,
    measure: int,
    lr: float = LR,
    bf16: bool = False,
    also: Collection[str] = (),
) -> int:
    """Train scale and shift for `steps`, then measure the statistics with `measure` batches; how many numbers moved.

    also: names of parameters that hold shifts of batch norm elsewhere.
    """
    own = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)]
    own += [parameter for name, parameter in model.named_parameters() if name in also]
    asked = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    for parameter in own:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(own, lr=lr, betas=(0.9, 0.99))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _rate(done, steps))
    model.train()
    endless = _again(batches)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = step(model, next(endless))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    for parameter, before in asked:
        parameter.requires_grad_(before)
    tgfx.recalibrate(model, batches, limit=measure)
    return sum(p.numel() for p in own)


def _rate(done: int, steps: int) -> float:
    return min(1.0, (done + 1) / WARM) * (1 + math.cos(math.pi * done / steps)) / 2


def _again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches
