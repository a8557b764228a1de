"""Weight pruning of VGG-16 on CIFAR-10 (the paper's Table 1 and its figure without fine-tuning).

python -m examples.vgg16.run tune    --data CIFAR --out runs/vgg16 --weights FILE
python -m examples.vgg16.run gates   --data CIFAR --out runs/vgg16
python -m examples.vgg16.run joint   --data CIFAR --out runs/vgg16 --budget 0.05
python -m examples.vgg16.run further --data CIFAR --out runs/vgg16
python -m examples.vgg16.run --quick
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.cifar10 import data
from examples.mistakes import reading, without_traceback
from examples.options import count, positive, share
from examples.resnet56.losses import PLAIN
from examples.vgg16.model import FULLY, VGG, load_convolutions_, start_batch_norm_
from examples.vgg16.steps import Experiment, Settings

STEPS = ("tune", "gates", "joint", "further")
QUICK_WIDTHS = (16, "pool", 32, "pool", 64, "pool", 64, "pool", 64, "pool")
MEASURED = 512  # images to start batch norm with


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            return _quick(Path(folder), options.loss, show=not options.quiet)
    if options.step is None or options.data is None:
        raise SystemExit(f"name a step ({', '.join(STEPS)}) and --data, or ask for --quick; see README.md")
    train, test = data.load(options.data)
    torch.manual_seed(options.seed)
    settings = Settings(
        tune_steps=options.steps or Settings.tune_steps, joint_steps=options.steps or Settings.joint_steps,
        gate_steps=options.steps or Settings.gate_steps, gate_loss=options.loss, joint_lr=options.lr,
        close=options.close, shares=options.shares, seed=options.seed, bf16=options.bf16,
    )  # fmt: skip
    make = partial(VGG, fully=FULLY if options.fully else ())
    own = Experiment(make, train, test, options.out, settings, options.beside, show=not options.quiet)
    if options.step == "tune":
        if options.tuned:
            return own.tune(lambda model, images: _from_tuned_(model, options.tuned))
        return own.tune(lambda model, images: _from_imagenet_(model, images, options.weights))
    if options.step == "gates":
        return own.gates()
    return own.joint(options.budget) if options.step == "joint" else own.further()


def _from_imagenet_(model: nn.Module, images: data.Images, file: Path | None) -> None:
    from safetensors.torch import load_file

    if file is None or not file.is_file():
        raise FileNotFoundError(
            f"no weights at {file}: --weights takes the state dict of torchvision's vgg16 (its convolutions are "
            "enough) as safetensors; see README.md"
        )
    assert isinstance(model, VGG)
    with reading(file, "the state dict of torchvision's vgg16 as safetensors"):
        load_convolutions_(model, load_file(file))
    start_batch_norm_(model, next(iter(data.Batches(images, MEASURED, augment=True)))[0])


def _from_tuned_(model: nn.Module, folder: Path) -> None:
    """The layers of `features`, with their batch norm; the fully-connected ones stay as they were drawn."""
    file = folder / "tune" / "model.pt"
    if not file.is_file():
        raise FileNotFoundError(f"no weights at {file}: --tuned takes the folder in which `tune` was run before")
    assert isinstance(model, VGG)
    with reading(file, "a net that `tune` has left"):
        state = torch.load(file, weights_only=True)
        own = {name.removeprefix("features."): value for name, value in state.items() if name.startswith("features.")}
        model.features.load_state_dict(own)


def _quick(out: Path, loss: str, *, show: bool) -> dict[str, Any]:
    """All four steps with a small net, from random weights, on images made here."""
    settings = Settings(
        batch=32, tune_steps=60, tune_lr=0.05, joint_steps=60, joint_lr=0.03, gate_steps=30, gate_batch=32,
        shares=[0.5, 0.2], recalibrate=10, gate_loss=loss,
    )  # fmt: skip
    torch.manual_seed(0)
    # a mirrored grating would be one of another class
    images = data.made(1024), data.made(500, seed=1)
    own = Experiment(lambda: VGG(QUICK_WIDTHS), *images, out, settings, show=show, augment=False)
    tuned = own.tune(lambda model, images: None)
    return {"tune": tuned, **own.gates(), "joint": own.joint(0.1), "further": own.further()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=STEPS)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (see README.md)")
    parser.add_argument("--weights", type=Path, help="convolutions of torchvision's vgg16, safetensors (for tune)")
    parser.add_argument("--tuned", type=Path, help="for tune: begin with the convolutions tuned in this folder")
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=(),
        help="for gates: other --out folders, to draw into the same figure",
    )
    parser.add_argument("--fully", action="store_true", help="with the fully-connected layers of the published net")
    parser.add_argument("--budget", type=share, default=0.05, help="share of the parameters to keep (for joint)")
    parser.add_argument("--steps", type=count, help="of this step; for gates: at each share")
    parser.add_argument("--shares", type=share, nargs="+", default=Settings().shares, help="to keep, for gates")
    parser.add_argument(
        "--loss", choices=("labels", *PLAIN), default=Settings.gate_loss, help="for gates; see resnet56/losses.py"
    )
    parser.add_argument("--lr", type=positive, default=Settings.joint_lr, help="for joint and further")
    parser.add_argument("--close", type=share, default=Settings.close, help="share of the joint steps until the budget")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast); accuracies are of float32")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/vgg16"))
    parser.add_argument("--quick", action="store_true", help="a small net on images made here, under a minute")
    parser.add_argument("--quiet", action="store_true")
    return parser


if __name__ == "__main__":
    main()
