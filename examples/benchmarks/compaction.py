"""Joint training with compaction over training without gates: the time of the same number of steps."""

from __future__ import annotations

import statistics

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import resnet56
from examples.benchmarks.tables import Table, cpu_seconds, met

TARGET = 0.8
RHO = 0.5
BATCH, SIZE = 128, 32
STEPS, CLOSING, EVERY = 120, 24, 6


def compaction(steps: int = STEPS) -> Table:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain, joint = _Plain(), _Joint()
    blocks: list[tuple[float, float]] = []
    for start in range(0, steps, EVERY):
        times = {}
        for one in (plain, joint) if (start // EVERY) % 2 else (joint, plain):  # nobody always goes first
            times[one] = sum(one.timed_step(step) for step in range(start, start + EVERY))
        blocks.append((times[plain], times[joint]))
        print(f"step {start + EVERY}: {times[joint] / times[plain]:.3f}", flush=True)
    torch.set_num_threads(threads)
    settled = CLOSING // EVERY + 2  # the last gates close, wait for a block, and go
    parts = {
        f"gates close (steps 1 to {settled * EVERY})": blocks[:settled],
        f"settled (steps {settled * EVERY + 1} to {steps})": blocks[settled:],
        "all": blocks,
    }
    rows = [(name, *_row(own)) for name, own in parts.items()]
    ratio = _ratio(blocks)
    return Table(
        "Compaction",
        f"ResNet-56, batch {BATCH}, {SIZE}x{SIZE}, SGD with momentum, {steps} steps. Joint training: gates close in a "
        f"fixed random order, evenly over the first {CLOSING} steps, until {RHO:.0%} of the FLOPs are left "
        f"({float(joint.gated.ratio().detach()):.1%} at the end), with `budget_loss(flops={RHO})` and "
        f"`tgfx.compact_(gated, optimizer)` every {EVERY} steps; {len(joint.compactions)} compactions, "
        f"{statistics.median(joint.compactions):.2f} s each in the median where channels went, count into its time. "
        f"Ungated: the same steps of the plain model. Processor seconds on one thread, the two taking turns every "
        f"{EVERY} steps.",
        ("part", "ungated, s a step", "joint, s a step", "time ratio"),
        rows,
        f"Time ratio {ratio:.3f} over the whole run (target at most {TARGET}: {met(ratio <= TARGET)}), "
        f"{_ratio(parts[list(parts)[1]]):.3f} once the gates have settled.",
    )


def _ratio(blocks: list[tuple[float, float]]) -> float:
    return sum(joint for _, joint in blocks) / sum(plain for plain, _ in blocks)


def _row(blocks: list[tuple[float, float]]) -> tuple[str, str, str]:
    count = len(blocks) * EVERY
    plain, joint = (sum(part) / count for part in zip(*blocks, strict=True))
    return f"{plain:.2f}", f"{joint:.2f}", f"{_ratio(blocks):.3f}"


class _Plain:
    """Training without gates."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = self.build().train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
        self.labels = torch.randint(10, (BATCH,), generator=generator)

    def build(self) -> nn.Module:
        return resnet56()

    def timed_step(self, number: int) -> float:
        return cpu_seconds(self.step)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        return F.cross_entropy(self.model(self.images), self.labels)


class _Joint(_Plain):
    """Training with gates that close by a schedule, and compaction."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.random.default_rng(0).permutation(self.gated.facts.coupling.slots)
        self.closed = 0
        self.compactions: list[float] = []

    def build(self) -> nn.Module:
        return tgfx.transform(resnet56(), torch.randn(1, 3, SIZE, SIZE))

    @property
    def gated(self) -> tgfx.GatedModule:
        assert isinstance(self.model, tgfx.GatedModule)
        return self.model

    def loss(self) -> torch.Tensor:
        return super().loss() + self.gated.budget_loss(flops=RHO)

    def timed_step(self, number: int) -> float:
        self._close(1 - (1 - RHO) * min((number + 1) / CLOSING, 1.0))  # what training would do: not timed
        seconds = cpu_seconds(self.step)
        if (number + 1) % EVERY == 0:
            seconds += self._compact()
        return seconds

    def _compact(self) -> float:
        reports: list[tgfx.CompactionReport] = []
        seconds = cpu_seconds(lambda: reports.append(tgfx.compact_(self.gated, self.optimizer)))
        if reports[0]:
            self.compactions.append(seconds)
        return seconds

    def _close(self, ratio: float) -> None:
        """Go on along the order until this share of the FLOPs is left."""
        while float(self.gated.ratio().detach()) > ratio:
            self.closed += 8
            going = self.order[: self.closed]
            for name, gate in self.gated.gates.items():
                mask = torch.from_numpy(~np.isin(self.gated.gate_slots(name), going))
                if mask.any():  # a group keeps a channel
                    gate.set_open_(mask)
