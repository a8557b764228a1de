"""Pieces per second of several models, timed in turns in one run: their ratios hold on a machine that is shared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from examples.translation.decoding import greedy
from examples.translation.model import Translator


def measure(models: Mapping[str, Translator], source: Tensor, target: Tensor, rounds: int) -> dict[str, dict]:
    """Of each model: pieces per second when it writes, and in one forward pass; `_ratio` is against the first model.

    A round times every model once, the next begins with another one. Ratios are taken within a round, and then their
    median: what else the machine does meets all models alike.
    """
    uses = {"decoding": lambda model: _written(model, source), "forward": lambda model: _forward(model, source, target)}
    first = next(iter(models))
    report: dict[str, dict] = {name: {} for name in models}
    for use, work in uses.items():
        rates = _in_turns(models, work, rounds)
        for name in models:
            report[name][use] = round(statistics.median(rates[name]), 1)
            ratios = [own / whole for own, whole in zip(rates[name], rates[first], strict=True)]
            report[name][f"{use}_ratio"] = round(statistics.median(ratios), 4)
            report[name][f"{use}_ratios"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return report


def _in_turns(
    models: Mapping[str, Translator], work: Callable[[Translator], int], rounds: int
) -> dict[str, list[float]]:
    names, rates = list(models), {name: [] for name in models}  # type: ignore[var-annotated]
    for model in models.values():
        work(model.eval())  # the first call is slower
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            began = time.perf_counter()
            pieces = work(models[name])
            rates[name].append(pieces / (time.perf_counter() - began))
    return rates


def _written(model: Translator, source: Tensor) -> int:
    return greedy(model, source, source.shape[1], until_end=False).numel()


@torch.no_grad()
def _forward(model: Translator, source: Tensor, target: Tensor) -> int:
    model(source, target)
    return source.numel() + target.numel()
