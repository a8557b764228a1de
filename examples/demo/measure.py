"""What the before/after table shows, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    model.train(training)
    return right.item()


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def largest_difference(a: nn.Module, b: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return (a.eval()(images) - b.eval()(images)).abs().max().item()


def alternating_milliseconds(models: Sequence[nn.Module], images: Tensor, rounds: int = 40) -> list[float]:
    """Median time of one batch for each model. They take turns, so that a busy machine is busy for all."""
    for model in models:
        model.eval()
    times: list[list[float]] = [[] for _ in models]
    with torch.no_grad():
        for turn in range(rounds + 5):
            for model, own in zip(models, times, strict=True):
                took = _seconds(lambda model=model: model(images))  # type: ignore[misc]
                if turn >= 5:  # the first turns warm up caches
                    own.append(1000 * took)
    return [statistics.median(own) for own in times]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
