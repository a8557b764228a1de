"""Does the gradient shape of the gates matter (the paper's figure)? ResNet-56 on CIFAR-10, joint training, shortened.

python -m examples.gradient_shapes.run --data CIFAR --weights resnet56.th --out FOLDER
python -m examples.gradient_shapes.run --quick
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import ResNet
from examples.cifar10 import data
from examples.gradient_shapes.figure import draw
from examples.resnet56.given import given
from examples.resnet56.run import accuracy
from examples.stage import Stage, digest

SHAPES = ("constant", "sigmoid", "tanh")
POINTS = 6  # at which accuracy is measured on the way


@dataclass
class Curve:
    """One run: the FLOPs left and the test accuracy after each of `steps`."""

    shape: str
    seed: int
    steps: list[int]
    flops: list[float]
    accuracy: list[float]
    seconds: float


@dataclass
class Task:
    """What all runs have in common."""

    model: nn.Module
    train: data.Images
    measured_on: data.Images
    budget: float
    steps: int
    batch: int
    lr: float
    bf16: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("budget", "steps", "batch", "lr", "bf16")}
        return {**same, "begins": digest(self.model), "images": [self.train.digest, self.measured_on.digest]}


def curve(task: Task, shape: str, seed: int, out: Path) -> Curve:
    """Trained anew, gone on with from its checkpoint, or read back if it was finished."""
    stage = Stage(out, {**task.asked, "shape": shape, "seed": seed}, prefix=f"{shape}-{seed}.")
    done = stage.begin()
    if done is not None:
        return Curve(**done["curve"])
    torch.manual_seed(seed)
    gated = tgfx.transform(copy.deepcopy(task.model), torch.randn(1, 3, 32, 32), gate=tgfx.GateSpec(shape=shape))
    loader = data.Batches(task.train, task.batch, augment=True, seed=seed)
    every = max(1, task.steps // POINTS)
    fitted = tgfx.fit(
        gated,
        loader,
        F.cross_entropy,
        budget={"flops": task.budget},
        steps=task.steps,
        lr=task.lr,
        amp=torch.bfloat16 if task.bf16 else None,
        val=lambda model: {"accuracy": accuracy(model, task.measured_on)},
        val_every=every,
        checkpoint=out / f"{shape}-{seed}.pt",
        checkpoint_every=every,
        log_every=every,
        progress=False,
        seed=seed,
    )
    stage.trained(fitted)
    rows = [row for row in fitted.history.rows if row.get("val_accuracy") is not None]
    found = Curve(
        shape,
        seed,
        [int(row["step"]) for row in rows],
        [float(row["ratio_flops"]) for row in rows],
        [float(row["val_accuracy"]) for row in rows],
        round(fitted.seconds, 1),
    )
    stage.write({"curve": asdict(found)})
    (out / f"{shape}-{seed}.pt").unlink(missing_ok=True)
    return found


def spreads(curves: Sequence[Curve]) -> tuple[float, float]:
    """At the end: largest distance of two shapes' mean accuracies, and the noise it is to be measured with.

    The noise is the standard deviation over seeds (pooled over the shapes), as it shows in a difference of two means.
    """
    finals = {shape: [c.accuracy[-1] for c in curves if c.shape == shape] for shape in SHAPES}
    means = [statistics.mean(values) for values in finals.values()]
    count = min(len(values) for values in finals.values())
    pooled = statistics.mean(statistics.variance(values) if count > 1 else 0.0 for values in finals.values())
    return max(means) - min(means), (2 * pooled / count) ** 0.5


def main(arguments: Sequence[str] | None = None) -> list[Curve]:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    began = time.time()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            return _all(_quick_task(), 1, Path(folder), began)
    model, train, test = given(options)
    task = Task(
        model,
        train,
        test.first(options.images),
        options.budget,
        options.steps,
        options.batch,
        options.lr,
        options.bf16,
    )
    return _all(task, options.seeds, options.out, began)


def _all(task: Task, seeds: int, out: Path, began: float) -> list[Curve]:
    out.mkdir(parents=True, exist_ok=True)
    curves = []
    for seed in range(seeds):
        for shape in SHAPES:
            one = curve(task, shape, seed, out)
            curves.append(one)
            print(
                f"{shape}, seed {seed}: {one.flops[-1]:.4f} of the FLOPs, accuracy {one.accuracy[-1]:.2%}", flush=True
            )
    apart, noise = spreads(curves)
    print(f"shapes are at most {apart:.2%} apart; one standard error of such a difference is {noise:.2%}")
    print(f"{time.time() - began:.0f} s in this call, {sum(c.seconds for c in curves):.0f} s in all runs")
    draw(curves, SHAPES, out / "shapes.svg")
    return curves


def _quick_task() -> Task:
    torch.manual_seed(0)
    return Task(ResNet(1), data.made(512), data.made(200, seed=1), 0.6, 24, 32, 0.05)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see ../resnet56/README.md)")
    parser.add_argument("--weights", type=Path, help="state dict of the trained ResNet-56")
    parser.add_argument("--budget", type=float, default=0.51, help="share of the FLOPs to keep")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast); accuracies are of float32")
    parser.add_argument("--images", type=int, default=2000, help="test images to measure on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/gradient_shapes"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, one seed")
    return parser


if __name__ == "__main__":
    main()
