"""Joint training with compaction over training without gates: the time of the same number of steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import resnet56
from examples.benchmarks.tables import Table, cpu_seconds, met
from examples.cifar10 import data
from examples.resnet56.given import whole_model

TARGET = 0.8
RHO = 0.5
BATCH = 128
STEPS, EVERY = 240, 6
ROUND_TO = 8
RATE = 0.02

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """A folder with CIFAR-10 and the weights of a ResNet-56 trained on it (see examples/resnet56)."""

    folder: Path
    weights: Path


def compaction(trained: Trained | None = None, steps: int = STEPS) -> Table:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    images = data.load(trained.folder)[0] if trained else data.made(20 * BATCH)
    start = [whole_model(trained.weights) if trained else _random() for _ in range(3)]
    runs = [_Plain(start[0]), _Joint(start[1], steps), _Joint(start[2], steps, round_to=ROUND_TO)]
    stream = _batches(images)
    blocks: list[list[float]] = []  # seconds of each run
    for number in range(steps // EVERY):
        batches = [next(stream) for _ in range(EVERY)]
        turn = number % len(runs)  # nobody always goes first
        times = {one: one.timed(batches) for one in runs[turn:] + runs[:turn]}
        blocks.append([times[one] for one in runs])
        found = (f"{times[one] / times[runs[0]]:.3f} ({one.ratio():.3f} of the FLOPs)" for one in runs[1:])
        print(f"step {(number + 1) * EVERY}: {', '.join(found)}", flush=True)
    torch.set_num_threads(threads)
    closing = round(tgfx.Schedule(steps).close * steps / EVERY)
    parts = {
        f"gates close (steps 1 to {closing * EVERY})": blocks[:closing],
        f"after that (to {steps})": blocks[closing:],
        "all": blocks,
    }
    _, any_size, rounded = _ratios(blocks)
    return Table(
        "Compaction",
        f"ResNet-56, {_START[trained is not None]}, {BATCH} a step, channels last, SGD with momentum, {steps} "
        f"steps. Joint training by the default rule and schedule, `gated.budget_loss(flops={RHO}, steps={steps})`, "
        f"with `tgfx.compact_(gated, optimizer)` every {EVERY} steps, which counts into its time "
        f"({statistics.median(runs[1].compactions):.2f} s in the median where channels went); once with sizes as they "
        f"come and once with `round_to={ROUND_TO}`. At the end {runs[1].ratio():.1%} and {runs[2].ratio():.1%} of the "
        f"FLOPs are left. Ungated: the same steps of the plain model. Processor seconds on one thread, taking turns "
        f"every {EVERY} steps.",
        ("part", "ungated, s a step", "joint, s a step", "time ratio", f"round_to={ROUND_TO}, s a step", "time ratio"),
        [(name, *_row(own)) for name, own in parts.items()],
        f"Time ratio {rounded:.3f} over the whole run with `round_to={ROUND_TO}` (target at most {TARGET}: "
        f"{met(rounded <= TARGET)}), {any_size:.3f} with sizes as they come ({met(any_size <= TARGET)}).",
    )


_START = ("random weights and coloured gratings in ten classes", "trained weights and the images of CIFAR-10")


def _random() -> nn.Module:
    torch.manual_seed(0)
    return resnet56()


def _batches(images: data.Images) -> Iterator[Batch]:
    loader = data.Batches(images, BATCH, augment=True)
    while True:
        yield from loader


def _ratios(blocks: list[list[float]]) -> list[float]:
    totals = [sum(times) for times in zip(*blocks, strict=True)]
    return [total / totals[0] for total in totals]


def _row(blocks: list[list[float]]) -> list[str]:
    count = len(blocks) * EVERY
    plain, *joint = (sum(times) / count for times in zip(*blocks, strict=True))
    return [f"{plain:.2f}", *(text for time in joint for text in (f"{time:.2f}", f"{time / plain:.3f}"))]


class _Plain:
    """Training without gates."""

    compactions: tuple[float, ...] | list[float] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.SGD(self.groups(), lr=RATE, momentum=0.9)

    def ratio(self) -> float:
        return 1.0

    def groups(self) -> list[dict[str, object]]:
        return [{"params": list(self.model.parameters())}]

    def timed(self, batches: list[Batch]) -> float:
        return sum(cpu_seconds(lambda batch=batch: self.step(batch)) for batch in batches)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.loss(*batch).backward()
        self.optimizer.step()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


class _Joint(_Plain):
    """Training with gates by the default rule, and compaction."""

    def __init__(self, model: nn.Module, steps: int, round_to: int | None = None) -> None:
        self.steps, self.round_to = steps, round_to
        self.compactions: list[float] = []
        super().__init__(tgfx.transform(model, torch.randn(1, 3, 32, 32)))

    def groups(self) -> list[dict[str, object]]:
        return tgfx.param_groups(self.gated, lr=RATE)

    @property
    def gated(self) -> tgfx.GatedModule:
        assert isinstance(self.model, tgfx.GatedModule)
        return self.model

    def ratio(self) -> float:
        return float(self.gated.ratio().detach())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images, labels) + self.gated.budget_loss(
            flops=RHO, steps=self.steps, round_to=self.round_to
        )

    def timed(self, batches: list[Batch]) -> float:
        return super().timed(batches) + self._compact()

    def _compact(self) -> float:
        reports: list[tgfx.CompactionReport] = []
        seconds = cpu_seconds(lambda: reports.append(tgfx.compact_(self.gated, self.optimizer)))
        if reports[0]:
            self.compactions.append(seconds)
        return seconds
