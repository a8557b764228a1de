"""(c) Transform time against depth."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.tables import Table, cpu_seconds, met

DEPTHS = (50, 100, 200, 500, 1000)
STEEPEST = 1.15  # exponent of a fit t ~ depth ** exponent: 1 is linear, with room for noise
CHANNELS = 8


class Chain(nn.Module):
    """`depth` convolutions with batch norm in a row; with `residual` each is added to its input."""

    def __init__(self, depth: int, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(depth))
        self.head = nn.Linear(CHANNELS, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(x)))
            x = x + y if self.residual else y
        return self.head(x.mean((2, 3)))


def growth(depths: tuple[int, ...] = DEPTHS, repeats: int = 3) -> Table:
    example = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tgfx.transform(Chain(10, residual=True), example)  # the first call pays for imports
    rows, exponents = [], {}
    for residual in (False, True):
        kind = "residual" if residual else "plain"
        seconds = []
        for depth in depths:
            model = Chain(depth, residual=residual).eval()
            runs = [cpu_seconds(lambda model=model: tgfx.transform(model, example)) for _ in range(repeats)]
            seconds.append(statistics.median(runs))
            rows.append((f"{kind}, {depth} layers", f"{seconds[-1]:.2f}", f"{1000 * seconds[-1] / depth:.2f}"))
            print(*rows[-1], sep="\t", flush=True)
        exponents[kind] = slope([math.log(d) for d in depths], [math.log(s) for s in seconds])
    torch.set_num_threads(threads)
    worst = max(exponents.values())
    fits = " and ".join(f"{exponent:.2f} for {kind} chains" for kind, exponent in exponents.items())
    return Table(
        "Growth",
        f"`tgfx.transform` on chains of convolution, batch norm and ReLU. Processor seconds on one thread, "
        f"median of {repeats}.",
        ("chain", "seconds", "ms per layer"),
        rows,
        f"Seconds grow like depth to the power of {fits} (1 is linear; target at most {STEEPEST}: "
        f"{met(worst <= STEEPEST)}).",
    )


def slope(x: list[float], y: list[float]) -> float:
    """Least squares."""
    return statistics.linear_regression(x, y).slope
