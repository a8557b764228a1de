"""Accuracy against the share of FLOPs with frozen weights (the paper's figure without fine-tuning).

python -m examples.resnet56.curve --data CIFAR --weights resnet56.th --out runs/curve
python -m examples.resnet56.curve --quick

Each run goes down from share to share. Gates are over channels, over connections too (which channels of a residual
sum each layer reads and each branch adds to), or over taps besides (which entries of its window each layer reads of
each channel); batch norm's statistics are measured anew, or kept too.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tgfx
from examples import options as kinds
from examples.cifar10 import data
from examples.curve_figure import draw
from examples.mistakes import without_traceback
from examples.resnet56.given import given
from examples.resnet56.losses import LOSSES
from examples.resnet56.run import GRANULARITIES, accuracy, quick_model
from examples.stage import Stage, digest, read_json

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MEASURED = 60  # batches to measure batch norm's statistics with
CHECKED, EXACT = 500, 1e-4  # test images on which cut and gated model are compared, and how far they may be apart
MODEL = "model.pt"
EXAMPLE = torch.zeros(1, 3, 32, 32)
WATCH = 0.2  # of the steps at a share in which gates are only watched: each share gathers its evidence anew


@dataclass(frozen=True)
class Run:
    """What gates are over, and with how many batches batch norm's statistics are measured at each share."""

    granularity: str
    measured: int


RUNS = {
    "taps": Run("tap", MEASURED),
    "taps, statistics kept": Run("tap", 0),
    "connections": Run("connection", MEASURED),
    "channels": Run("channel", MEASURED),
    "channels, statistics kept": Run("channel", 0),
}


@dataclass(frozen=True)
class Point:
    """The model at one share: what was asked for, what it takes, how right it is on the test images; s of training."""

    run: str
    share: float
    flops: float
    params: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Task:
    model: nn.Module
    train: data.Images
    test: data.Images
    shares: Sequence[float]
    steps: int  # at each share
    batch: int
    loss: str
    bf16: bool
    seed: int

    def asked(self, share: float, gated: tgfx.GatedModule) -> dict[str, Any]:
        """Each share goes on from the one before: `gated`, as this one begins."""
        same = {name: getattr(self, name) for name in ("steps", "batch", "loss", "bf16", "seed")}
        way = [own for own in self.shares if own >= share]
        begins = {"begins": digest(self.model), "gates": digest(gated)}
        return {**same, "way": way, **begins, "images": [self.train.digest, self.test.digest]}


def go_down(task: Task, run: str, out: Path) -> list[Point]:
    """From share to share; what was done before is read back."""
    own = RUNS[run]
    gated = tgfx.transform(copy.deepcopy(task.model), EXAMPLE, granularity=GRANULARITIES[own.granularity])
    points = []
    for share in task.shares:
        folder = out / f"{run.replace(', ', '-').replace(' ', '-')}-{share:g}"
        stage = Stage(folder, task.asked(share, gated), later=["gates"])
        found = stage.begin()
        if found is None:
            fitted = _train_gates(task, gated, own, share, stage)
            stage.trained(fitted)
            torch.save(gated.state_dict(), folder / MODEL)
            found = stage.write({"point": asdict(_point(task, gated, run, share, fitted.seconds))})
        gated.load_state_dict(torch.load(folder / MODEL, weights_only=True))
        points.append(Point(**found["point"]))
        print(points[-1], flush=True)
    return points


def _train_gates(task: Task, gated: tgfx.GatedModule, run: Run, share: float, stage: Stage) -> tgfx.FitResult:
    return tgfx.fit(
        gated,
        data.Batches(task.train, task.batch, augment=True, seed=task.seed),
        training_step=LOSSES[task.loss](task.model),
        budget={"flops": share},
        steps=task.steps,
        schedule=tgfx.Schedule(task.steps, watch=WATCH, close=0.7, hold=0.95),
        train="gates",
        recalibrate=run.measured,
        amp=torch.bfloat16 if task.bf16 else None,
        checkpoint=stage.checkpoint,
        checkpoint_every=100,
        log=stage.folder / "log",
        log_every=10,
        progress=False,
        seed=task.seed,
    )


def _point(task: Task, gated: tgfx.GatedModule, run: str, share: float, seconds: float) -> Point:
    gated.eval()  # in training mode, prices follow the trainable gate and are not quite whole numbers
    ratios = {kind: gated.ratio(kind).item() for kind in ("flops", "params")}
    _check_cut(gated, task.test)
    right = accuracy(gated, task.test)
    return Point(run, share, ratios["flops"], ratios["params"], right, round(seconds))


def _check_cut(gated: tgfx.GatedModule, images: data.Images) -> None:
    """The cut model answers as the gated one does, which takes less time to ask: cut taps are gathered at length."""
    x, _ = next(iter(data.Batches(images.first(CHECKED), CHECKED, augment=False)))
    with torch.no_grad():
        expected, found = gated(x), tgfx.shrink(gated)(x)
    off = float((found - expected).abs().max() / expected.abs().max())
    if off > EXACT:
        raise RuntimeError(f"the cut model is off by {off:.3g} of its largest answer")


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> list[Point]:
    parser = _parser()
    options = parser.parse_args(arguments)
    if list(options.shares) != sorted(set(options.shares), reverse=True):
        parser.error("--shares fall: each one goes on from the one before")
    torch.set_num_threads(1)
    if options.quick:
        task = Task(quick_model(), data.made(512), data.made(200, seed=1), (0.8, 0.6), 20, 32, "probe", False, 0)
        with tempfile.TemporaryDirectory() as folder:
            return _all(task, Path(folder), tuple(RUNS))
    task = Task(*given(options), options.shares, options.steps, options.batch, options.loss, options.bf16, options.seed)
    return _all(task, options.out, options.runs)


def _all(task: Task, out: Path, runs: Sequence[str]) -> list[Point]:
    began = time.time()
    whole = accuracy(task.model, task.test)
    points = [point for run in runs for point in go_down(task, run, out)]
    draw(_lines(out, whole), out / "curve.svg", title="test accuracy, weights frozen", unit="FLOPs")
    print(f"the whole model: {whole:.2%}; {time.time() - began:.0f} s in this call")
    return points


def _lines(out: Path, whole: float) -> dict[str, list[tuple[float, float]]]:
    """Of all runs in this folder, those of other calls too: (share, accuracy), from large to small."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for file in out.glob("*/result.json"):
        point = Point(**read_json(file)["point"])
        lines.setdefault(point.run, [(1.0, whole)]).append((point.flops, point.accuracy))
    return {run: sorted(lines[run], reverse=True) for run in RUNS if run in lines}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see README.md)")
    parser.add_argument("--weights", type=Path, help="state dict of the trained ResNet-56")
    parser.add_argument("--shares", type=kinds.share, nargs="+", default=SHARES, help="of the FLOPs, falling")
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=tuple(RUNS), help="default: all")
    parser.add_argument("--steps", type=kinds.count, default=100, help="at each share")
    parser.add_argument("--batch", type=kinds.count, default=128)
    parser.add_argument("--loss", choices=tuple(LOSSES), default="probe", help="see losses.py")
    parser.add_argument("--bf16", action="store_true", help="search in bfloat16 (autocast); accuracies are of float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/resnet56-curve"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, under a minute")
    return parser


if __name__ == "__main__":
    main()
