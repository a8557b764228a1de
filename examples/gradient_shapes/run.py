"""Does the gradient shape of the gates matter (the paper's figure)? ResNet-56 on CIFAR-10, joint training, shortened.

python -m examples.gradient_shapes.run --data CIFAR --weights resnet56.th --out FOLDER
python -m examples.gradient_shapes.run --data CIFAR --weights resnet56.th --rule paper --weight 10 --out FOLDER
python -m examples.gradient_shapes.run --quick
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import ResNet
from examples.cifar10 import data
from examples.gradient_shapes.figure import draw
from examples.mistakes import without_traceback
from examples.options import count, positive, share
from examples.resnet56.given import given
from examples.resnet56.run import accuracy
from examples.stage import Stage, digest, make_folder

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
    """What all runs have in common. The default rule divides the shape out of the gradients, the paper's does not."""

    model: nn.Module
    train: data.Images
    measured_on: data.Images
    budget: float
    steps: int
    batch: int
    lr: float
    bf16: bool = False
    rule: Literal["default", "paper"] = "default"
    weight: float | None = None
    gate_lr: float | None = None
    adam: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        names = ["budget", "steps", "batch", "lr", "bf16"]
        names += ["rule", "weight", "gate_lr"] if self.rule == "paper" else []  # older results of the default have none
        same = {name: getattr(self, name) for name in names}
        same |= {"gates": "drawn by seed"} if self.rule == "paper" else {}
        same |= {"optimizer": "adam"} if self.adam else {}
        return {**same, "begins": digest(self.model), "images": [self.train.digest, self.measured_on.digest]}


def curve(task: Task, shape: str, seed: int, out: Path) -> Curve:
    """Trained anew, gone on with from its checkpoint, or read back if it was finished."""
    name = f"{shape}-{seed}"
    stage = Stage(out, {**task.asked, "shape": shape, "seed": seed}, prefix=f"{name}.", checkpoint=f"{name}.pt")
    done = stage.begin()
    if done is not None:
        return Curve(**done["curve"])
    torch.manual_seed(seed)
    gated = tgfx.transform(copy.deepcopy(task.model), torch.randn(1, 3, 32, 32), gate=_gates(task, shape))
    loader = data.Batches(task.train, task.batch, augment=True, seed=seed)
    every = max(1, task.steps // POINTS)
    fitted = tgfx.fit(
        gated,
        loader,
        F.cross_entropy,
        budget={"flops": task.budget},
        steps=task.steps,
        rule=task.rule,
        weight=task.weight,
        lr=task.lr,
        gate_lr=task.gate_lr,
        optimizer=_by_adam(task, gated) if task.adam else None,
        amp=torch.bfloat16 if task.bf16 else None,
        val=lambda model: {"accuracy": accuracy(model, task.measured_on)},
        val_every=every,
        checkpoint=stage.checkpoint,
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
    stage.checkpoint.unlink(missing_ok=True)
    return found


def _gates(task: Task, shape: str) -> tgfx.GateSpec:
    """The paper's rule begins with random gates, other ones for each seed; the default rule with open ones."""
    return tgfx.GateSpec(shape=shape, init=_drawn if task.rule == "paper" else "constant")


def _by_adam(task: Task, gated: tgfx.GatedModule) -> torch.optim.Optimizer:
    """Weights and gates by Adam, whose steps do not depend on how large the gates' slopes are."""
    weights, *gates = tgfx.param_groups(gated, lr=task.lr, gate_lr=task.gate_lr)
    return torch.optim.Adam([weights, *({**group, "eps": 1e-8} for group in gates)])


def _drawn(size: int) -> Tensor:
    """From (0, 1] like init="random", but by the random state: so the reported runs were begun."""
    return 1 - torch.rand(size)


@dataclass(frozen=True)
class Spread:
    """After `step` steps: the largest distance of two shapes' mean accuracies, and one standard error of a distance.

    The error is from the standard deviation over seeds, pooled over the shapes. It is nan for one seed.
    Of three shapes with three seeds each that do not differ, the largest distance is above 1.2 standard errors half of
    the time, and above 3.1 once in twenty.
    """

    step: int
    apart: float
    error: float


def spreads(curves: Sequence[Curve]) -> list[Spread]:
    """At every step that was measured."""
    return [_spread(curves, place) for place in range(len(curves[0].steps))]


def _spread(curves: Sequence[Curve], place: int) -> Spread:
    found = {shape: [c.accuracy[place] for c in curves if c.shape == shape] for shape in SHAPES}
    means = [statistics.mean(values) for values in found.values()]
    seeds = min(len(values) for values in found.values())
    pooled = statistics.mean(statistics.variance(values) for values in found.values()) if seeds > 1 else math.nan
    return Spread(curves[0].steps[place], max(means) - min(means), (2 * pooled / seeds) ** 0.5)


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> list[Curve]:
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    torch.set_num_threads(options.threads)
    began = time.time()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            task = _quick_task(options.rule, options.weight, options.gate_lr)
            return _all(replace(task, adam=options.adam), 1, Path(folder), began)
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
        options.rule,
        options.weight,
        options.gate_lr,
        options.adam,
    )
    return _all(task, options.seeds, options.out, began)


def _all(task: Task, seeds: int, out: Path, began: float) -> list[Curve]:
    make_folder(out)
    curves = []
    for seed in range(seeds):
        for shape in SHAPES:
            one = curve(task, shape, seed, out)
            curves.append(one)
            print(
                f"{shape}, seed {seed}: {one.flops[-1]:.4f} of the FLOPs, accuracy {one.accuracy[-1]:.2%}", flush=True
            )
    for one in spreads(curves):
        print(f"step {one.step}: shapes at most {one.apart:.2%} apart, standard error of a distance {one.error:.2%}")
    print(f"{time.time() - began:.0f} s in this call, {sum(c.seconds for c in curves):.0f} s in all runs")
    draw(curves, SHAPES, out / "shapes.svg")
    return curves


def _quick_task(
    rule: Literal["default", "paper"] = "default", weight: float | None = None, gate_lr: float | None = None
) -> Task:
    torch.manual_seed(0)
    train, test = data.made(512), data.made(200, seed=1)
    return Task(ResNet(1), train, test, 0.6, 24, 32, 0.05, rule=rule, weight=weight, gate_lr=gate_lr)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Options that would have no effect, or that are needed."""
    if options.rule == "default" and (options.weight is not None or options.gate_lr is not None):
        parser.error("--weight and --gate-lr are for --rule paper: the default rule moves the gates by itself")
    if options.rule == "default" and options.adam:
        parser.error("--adam is for --rule paper")
    if options.rule == "paper" and options.weight is None:
        parser.error("--rule paper needs --weight, the lambda of equation 7")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see ../resnet56/README.md)")
    parser.add_argument("--weights", type=Path, help="state dict of the trained ResNet-56")
    parser.add_argument("--budget", type=share, default=0.51, help="share of the FLOPs to keep")
    parser.add_argument("--rule", choices=("default", "paper"), default="default")
    parser.add_argument("--weight", type=positive, help="the paper's lambda, for --rule paper")
    parser.add_argument("--gate-lr", type=positive, help="rate of the gates, for --rule paper; default: --lr")
    parser.add_argument("--adam", action="store_true", help="train weights and gates by Adam, for --rule paper")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=240)
    parser.add_argument("--batch", type=count, default=64)
    parser.add_argument("--lr", type=positive, default=0.01)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast); accuracies are of float32")
    parser.add_argument("--images", type=count, default=2000, help="test images to measure on")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/gradient_shapes"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, one seed")
    return parser


if __name__ == "__main__":
    main()
