"""The same job with Torch-Pruning's group pruner: same checkpoint, data, epochs, optimizer and rates.

python -m examples.resnet56.peer --data CIFAR --weights resnet56.th --budget 0.51 --epochs 10 --sparse-epochs 0
python -m examples.resnet56.peer --quick

Its usual way: (sparse learning with the pruner's regulariser, then) cut to the budget at once, then fine-tune. The
cosine of the learning rate runs over all epochs, as it does for the gated model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from examples.cifar10 import data
from examples.mistakes import without_traceback
from examples.options import count, positive, share
from examples.resnet56.given import given
from examples.resnet56.losses import LOSSES, PLAIN, Step
from examples.resnet56.run import BATCH, accuracy, quick_model
from examples.stage import Stage, digest
from tgfx.whole_file import whole_file

STEPS = 400  # in which the pruner goes towards its largest ratio; it stops at the budget


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            options.out, options.epochs, options.sparse_epochs, options.batch = Path(folder), 2, 1, 32
            return _run(options, quick_model(), data.made(512), data.made(200, seed=1))
    if not 0 <= options.sparse_epochs < options.epochs:
        parser.error("--sparse-epochs come before the cut: fewer than --epochs")
    return _run(options, *given(options))


def _version() -> str:
    try:
        return metadata.version("torch-pruning")
    except metadata.PackageNotFoundError as error:
        raise SystemExit("this needs Torch-Pruning: pip install torch-pruning==1.6.1, or make zoo") from error


def _run(options: argparse.Namespace, model: nn.Module, train: data.Images, test: data.Images) -> dict[str, Any]:
    asked = {**_asked(options), "begins": digest(model), "images": [train.digest, test.digest]}
    stage = Stage(options.out, asked)
    done = stage.begin()
    if done is not None:
        print(f"{stage.result} is there already", flush=True)
        return done
    version = _version()  # before hours of training, not after
    before, whole, weights = accuracy(model, test), flops(model), sum(p.numel() for p in model.parameters())
    loader = data.Batches(train, options.batch, augment=not options.quick, seed=options.seed)
    try:
        state = _trained(options, stage, model, loader, test)
    except KeyboardInterrupt as error:
        raise SystemExit("stopped; start it again to go on from the last whole epoch") from error
    stage.lasted(state.seconds)
    report = stage.write(
        {
            "tool": f"torch-pruning {version}, GroupNormPruner",
            "flops": flops(state.model) / whole,
            "params": sum(p.numel() for p in state.model.parameters()) / weights,
            "steps": options.epochs * len(loader),
            "before": before,
            "after": accuracy(state.model, test),
            "seconds": round(state.seconds),
        }
    )
    print(report)
    return report


def _trained(
    options: argparse.Namespace, stage: Stage, model: nn.Module, loader: data.Batches, test: data.Images
) -> _State:
    """From its checkpoint, if there is one, or from `model`, to the last epoch."""
    step = _by_labels if options.loss == "labels" else LOSSES[options.loss](model)
    total, whole = options.epochs * len(loader), flops(model)
    state = _State(model, 0, loader.generator.get_state(), torch.get_rng_state(), None, 0.0)
    if stage.checkpoint.is_file():  # of this script, with whole objects: the cut model has no other description
        state = torch.load(stage.checkpoint, weights_only=False)
        loader.generator.set_state(state.generator)
        torch.set_rng_state(state.random)  # for losses with noise
    training = _Training(state.model, total, options.lr, state.epoch * len(loader), state.optimizer)
    pruner = group_pruner(state.model) if state.epoch < options.sparse_epochs else None
    for epoch in range(state.epoch, options.epochs):
        began = time.time()
        if epoch == options.sparse_epochs:
            cut(pruner or group_pruner(state.model), options.budget * whole)
            pruner = None
            training = _Training(state.model, total, options.lr, epoch * len(loader))
            print(f"cut to {flops(state.model) / whole:.4f}: accuracy {accuracy(state.model, test):.4f}", flush=True)
        losses = [training.step(step, batch, pruner, options.bf16) for batch in loader]
        seconds = state.seconds + time.time() - began
        draws = loader.generator.get_state(), torch.get_rng_state()
        state = _State(state.model, epoch + 1, *draws, training.optimizer.state_dict(), seconds)
        with whole_file(stage.checkpoint) as aside:
            torch.save(state, aside)
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, {seconds:.0f} s", flush=True)
    return state


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    same = ("budget", "epochs", "sparse_epochs", "batch", "lr", "loss", "bf16", "seed")
    return {name: getattr(options, name) for name in same}


@dataclass
class _State:
    """After `epoch` epochs."""

    model: nn.Module
    epoch: int
    generator: torch.Tensor
    random: torch.Tensor
    optimizer: dict[str, Any] | None
    seconds: float


class _Training:
    """SGD with momentum under a cosine, as `tgfx.fit` makes them by default."""

    def __init__(self, model: nn.Module, total: int, lr: float, done: int, state: dict[str, Any] | None = None) -> None:
        self.model, self.total, self.lr, self.done = model, total, lr, done
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        if state is not None:
            self.optimizer.load_state_dict(state)

    def step(self, loss_of: Step, batch: Any, pruner: Any, bf16: bool) -> float:
        self.model.train()
        self.optimizer.param_groups[0]["lr"] = self.lr * (1 + math.cos(math.pi * self.done / self.total)) / 2
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(self.model, batch)
        loss.backward()
        if pruner is not None:
            pruner.regularize(self.model)
        self.optimizer.step()
        self.done += 1
        return loss.item()


def _by_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def group_pruner(model: nn.Module) -> Any:
    """As its authors use it on CIFAR-10: global, by group norms, the classifier left alone.

    Nor does it touch the residual streams: their zero-padded shortcuts make it cut layers that no longer fit each other
    (1.6: "mat1 and mat2 shapes cannot be multiplied"), so only the channels inside blocks are left to it.
    """
    import torch_pruning as tp

    model.eval()
    return tp.pruner.GroupNormPruner(
        model,
        torch.randn(1, 3, 32, 32),
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        reg=5e-4,
        global_pruning=True,
        pruning_ratio=1.0,
        max_pruning_ratio=0.9,
        iterative_steps=STEPS,
        ignored_layers=[
            layer for name, layer in model.named_modules() if name.endswith(("conv2", "linear")) or name == "conv1"
        ],
    )


def cut(pruner: Any, wanted: float) -> None:
    """Step by step until no more than `wanted` FLOPs are left."""
    for _ in range(STEPS):
        pruner.step()
        if flops(pruner.model) <= wanted:
            return
    raise RuntimeError(f"the pruner stopped at {flops(pruner.model)} FLOPs, above {wanted}")


def flops(model: nn.Module) -> int:
    was = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    model.train(was)
    return counter.get_total_flops()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see README.md)")
    parser.add_argument("--weights", type=Path, help="state dict of the trained ResNet-56")
    parser.add_argument("--budget", type=share, default=0.51, help="share of the FLOPs to keep")
    parser.add_argument("--epochs", type=count, default=10)
    parser.add_argument("--sparse-epochs", type=int, default=0, help="of these, with the regulariser, before the cut")
    parser.add_argument("--lr", type=positive, default=0.01)
    parser.add_argument("--batch", type=count, default=BATCH)
    parser.add_argument("--loss", choices=("labels", *PLAIN), default="labels", help="see losses.py")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/peer"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, under a minute")
    return parser


if __name__ == "__main__":
    main()
