"""Channel pruning of ResNet-56 on CIFAR-10 (the paper's Table 1 and its figure without fine-tuning).

python -m examples.resnet56.run --data CIFAR --weights resnet56.th --train joint --budget 0.51 --epochs 40
python -m examples.resnet56.run --quick
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.benchmarks.resnet56 import ResNet
from examples.cifar10 import data
from examples.mistakes import without_traceback
from examples.options import count, positive, share
from examples.resnet56.given import given
from examples.resnet56.losses import LOSSES
from examples.stage import CHECKPOINT, Stage, digest

BATCH = 128
QUICK_PASSES = 4  # over the made images, to train the small net
# finer: channels, connections of residual sums, and taps
GRANULARITIES = {"channel": "channel", "connection": "connection", "tap": ("connection", "tap")}


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    torch.set_num_threads(options.threads)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.out, options.steps, options.budget, options.batch = Path(folder), 12, 0.6, 32
            return _run(options, quick_model(), data.made(512), data.made(200, seed=1))
    return _run(options, *given(options))


def accuracy(model: nn.Module, images: data.Images) -> float:
    """Share of right answers, in eval mode."""
    was, right = model.training, 0
    model.eval()
    with torch.no_grad():
        for x, target in data.Batches(images, 500, augment=False):
            right += int((model(x).argmax(1) == target).sum())
    model.train(was)
    return right / len(images)


def _run(options: argparse.Namespace, model: nn.Module, train: data.Images, test: data.Images) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    loader = data.Batches(train, options.batch, augment=not options.quick, seed=options.seed)
    steps = options.steps or round(options.epochs * len(loader))
    asked = {**_asked(options), "steps": steps, "begins": digest(model), "images": [train.digest, test.digest]}
    stage = Stage(options.out, asked)
    done = stage.begin()
    if done is not None:
        print(f"{stage.result} is there already", flush=True)
        return done
    gated = _gated(options, model)
    fitted = [_train(options, gated, model, loader, steps)]
    stage.trained(fitted[0])
    if options.settle:
        fitted.append(_settle(options, gated, model, loader))
        stage.trained(fitted[1])
    report = stage.write(
        {
            **_measured(options, gated, test),
            **_kept(options, gated, model, test),
            "before": accuracy(model, test),
            "seconds": round(sum(one.seconds for one in fitted)),
        }
    )
    if not options.quiet:
        print({key: value for key, value in report.items() if key != "widths"})
    return report


def _gated(options: argparse.Namespace, model: nn.Module) -> tgfx.GatedModule:
    return tgfx.transform(
        copy.deepcopy(model),
        torch.randn(1, 3, 32, 32),
        granularity=GRANULARITIES[options.granularity],
        gate=_gates(options),
    )


def _kept(
    options: argparse.Namespace, gated: tgfx.GatedModule, model: nn.Module, test: data.Images
) -> dict[str, float]:
    """What measuring batch norm's statistics anew brings, where only gates and these differ from the original."""
    if options.train != "gates" or not options.recalibrate:
        return {}
    return {"kept": with_kept_statistics(gated, _gated(options, model), test)}


def with_kept_statistics(gated: tgfx.GatedModule, fresh: tgfx.GatedModule, test: data.Images) -> float:
    """How right the same gates are where all else is as in the original model, batch norm's statistics too."""
    for name, gate in gated.gates.items():
        fresh.gates[name].set_open_(gate.is_open())
    return accuracy(fresh, test)


def _loss(options: argparse.Namespace) -> str:
    if options.loss is not None:
        return options.loss
    by_paper = options.rule == "paper"  # which takes the gradients as they are, and no probe
    return {"joint": "labels", "norms": "blur", "gates": "match" if by_paper else "probe"}[options.train]


def _train(
    options: argparse.Namespace, gated: tgfx.GatedModule, model: nn.Module, loader: data.Batches, steps: int
) -> tgfx.FitResult:
    """To the budget; `model` answers what the gated one is to learn."""
    step = LOSSES.get(_loss(options))
    return tgfx.fit(
        gated,
        loader,
        F.cross_entropy if step is None else None,
        training_step=None if step is None else step(model),
        budget={"flops": options.budget},
        steps=steps,
        schedule=_schedule(options, steps),
        train="gates" if options.train == "gates" else "joint",
        optimizer=for_norms(gated, options.lr) if options.train == "norms" else None,
        rule=options.rule,
        weight=options.weight,
        lr=options.lr,
        gate_lr=options.gate_lr,
        amp=torch.bfloat16 if options.bf16 else None,
        recalibrate=options.recalibrate,
        compact_every=options.compact_every,
        checkpoint=options.out / CHECKPOINT,
        checkpoint_every=200,
        log=options.out / "log",
        log_every=50,
        progress=not options.quiet,
        seed=options.seed,
    )


def _settle(
    options: argparse.Namespace, gated: tgfx.GatedModule, model: nn.Module, loader: data.Batches
) -> tgfx.FitResult:
    """Batch norm alone, gates as they are, towards the answers themselves: noise on them tells of gates only."""
    return tgfx.fit(
        gated,
        loader,
        training_step=LOSSES["match"](model),
        budget=None,
        steps=options.settle,
        optimizer=for_norms(gated, options.lr),
        amp=torch.bfloat16 if options.bf16 else None,
        recalibrate=options.recalibrate,
        checkpoint=options.out / "settle.pt",
        checkpoint_every=200,
        log=options.out / "settle",
        log_every=50,
        progress=not options.quiet,
        seed=options.seed + 1,
    )


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    same = ("train", "budget", "granularity", "rule", "weight", "batch", "lr", "gate_lr", "bf16", "close", "settle",
            "recalibrate", "compact_every", "seed")  # fmt: skip
    return {**{name: getattr(options, name) for name in same}, "loss": _loss(options)}


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Options that would have no effect, or that are needed."""
    if options.train != "gates" and options.loss == "probe":
        parser.error("--loss probe is for --train gates: it tells of gates alone")
    if options.settle and options.train != "norms":
        parser.error("--settle is for --train norms")
    if options.recalibrate and options.train == "joint":
        parser.error("--recalibrate is for --train gates and norms: joint training measures batch norm by itself")
    if options.rule == "default" and (options.weight is not None or options.gate_lr is not None):
        parser.error("--weight and --gate-lr are for --rule paper: the default rule moves the gates by itself")
    if options.rule == "paper" and options.weight is None:
        parser.error("--rule paper needs --weight, the lambda of equation 7")


def _measured(options: argparse.Namespace, gated: tgfx.GatedModule, test: data.Images) -> dict[str, Any]:
    """What the gated model takes and how right it is, and how right the cut one."""
    gated.eval()  # in training mode, prices follow the trainable gate and are not quite whole numbers
    as_trained = accuracy(gated, test)
    compact = tgfx.finish(gated, flops=options.budget).model if options.rule == "default" else tgfx.shrink(gated)
    return {
        "flops": gated.ratio("flops").item(),
        "params": gated.ratio("params").item(),
        "trained": as_trained,
        "compact": accuracy(compact, test),
        "widths": {group.name: gated.gates[group.name].open_count() for group in gated.groups if not group.frozen},
    }


def for_norms(gated: tgfx.GatedModule, lr: float) -> torch.optim.Optimizer:
    """Holds the gates and batch norm's scale and shift; all other weights ask for no gradient from now on."""
    own = {id(p) for m in gated.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)}
    own |= {id(gate.weight) for gate in gated.gates.values()}
    for parameter in gated.parameters():
        parameter.requires_grad_(id(parameter) in own)
    return torch.optim.Adam(tgfx.param_groups(gated, lr=lr), betas=(0.9, 0.99))


def _gates(options: argparse.Namespace) -> tgfx.GateSpec | None:
    """The paper's rule begins with random gates; the default rule with open ones."""
    return tgfx.GateSpec(init="random") if options.rule == "paper" else None


def _schedule(options: argparse.Namespace, steps: int) -> tgfx.Schedule | None:
    """None: the library's own. A short joint run leaves the weights more time if its gates close early."""
    if options.close is None:
        return None
    return tgfx.Schedule(steps, close=options.close, hold=min(1.0, options.close + 0.1))


def quick_model() -> nn.Module:
    """Small, and trained on images made here."""
    torch.manual_seed(0)
    model = ResNet(1)
    model.load_state_dict(_trained_state())
    return model


@cache
def _trained_state() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        # a mirrored grating would be one of another class, so nothing is mirrored
        batches = list(data.Batches(data.made(512), 32, augment=False))
        for x, target in QUICK_PASSES * batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
    return model.state_dict()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see README.md)")
    parser.add_argument("--weights", type=Path, help="state dict of the trained ResNet-56")
    parser.add_argument(
        "--train",
        choices=("joint", "norms", "gates"),
        default="joint",
        help="gates and: all weights, batch norm's scale and shift, none",
    )
    parser.add_argument("--granularity", choices=tuple(GRANULARITIES), default="channel")
    parser.add_argument("--rule", choices=("default", "paper"), default="default")
    parser.add_argument("--weight", type=positive, help="the paper's lambda, for --rule paper")
    parser.add_argument("--budget", type=share, default=0.5, help="share of the FLOPs to keep")
    parser.add_argument("--epochs", type=positive, default=40)
    parser.add_argument("--steps", type=count)
    parser.add_argument("--lr", type=positive, default=0.01)
    parser.add_argument("--gate-lr", type=positive)
    parser.add_argument("--batch", type=count, default=BATCH)
    parser.add_argument(
        "--loss",
        choices=("labels", *LOSSES),
        help="see losses.py; default: labels for joint, blur for norms, probe for gates",
    )
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast); accuracies are of float32")
    parser.add_argument("--close", type=share, help="share of the steps after which the budget is reached")
    parser.add_argument("--settle", type=int, default=0, help="with norms: steps for batch norm alone at the end")
    parser.add_argument("--compact-every", type=count)
    parser.add_argument("--recalibrate", type=int, default=0, help="batches to measure batch norm with, not in joint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/resnet56"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, under a minute")
    parser.add_argument("--quiet", action="store_true")
    return parser


if __name__ == "__main__":
    main()
