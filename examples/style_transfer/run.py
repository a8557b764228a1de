"""N-style transfer with fewer channels (the paper's Table 2 and its figures).

python -m examples.style_transfer.run --data FOLDER --out runs/style
python -m examples.style_transfer.run --quick
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.mistakes import without_traceback
from examples.options import count, positive, share
from examples.stage import write_json
from examples.style_transfer import data, features, measure, pictures
from examples.style_transfer.losses import StyleLoss
from examples.style_transfer.training import Model, Protocol, result_of, train

FIRST, WHOLE = Model("first", None, None), Model("original", None, "first")
SHOWN = [3, 17]  # test photographs in the figure


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.quick:
        protocol = Protocol(steps=50, more=60, side=24, batch=4, width=8, blocks=2, lr=5e-3, compact_every=15)
        with tempfile.TemporaryDirectory() as folder:
            return _run(options, protocol, data.made(), features.random_features(), options.out or Path(folder))
    if options.data is None:
        raise SystemExit("--data FOLDER is needed (README.md says what is in it and where people get it), or --quick")
    protocol = Protocol(
        options.steps, options.more, options.side, options.batch, lr=options.lr, seed=options.seed, bf16=options.bf16
    )
    eyes, shown = features.vgg16(options.data / "vgg16_features"), data.load(options.data)
    return _run(options, protocol, shown, eyes, options.out or Path("runs/style_transfer"))


def _run(
    options: argparse.Namespace, protocol: Protocol, shown: data.Pictures, eyes: features.Features, out: Path
) -> dict[str, Any]:
    cuts = [Model(f"channels_{share:g}", share, FIRST.name) for share in options.shares]
    if options.weight is not None:
        cuts += [Model(f"lambda_{share:g}", share, FIRST.name, options.weight) for share in options.shares]
    models = [FIRST, WHOLE, *cuts]
    if options.only is not None:
        names = [model.name for model in models]
        if options.only not in names:
            raise SystemExit(f"--only {options.only}: there are {', '.join(names)} (lambda_... with --weight)")
        models = [model for model in models if model.name == options.only]
    loss = StyleLoss(eyes, shown.styles)
    for model in models:
        train(model, protocol, shown, loss, out, options.quiet)
    compared = [WHOLE, *cuts]
    if not all((out / model.name / "result.json").is_file() for model in compared):
        return {}
    return _compare(compared, shown, out, photographs=options.photographs, quiet=options.quiet)


def _compare(models: list[Model], shown: data.Pictures, out: Path, *, photographs: bool, quiet: bool) -> dict[str, Any]:
    """The table and the figures, from the files that the models were written to."""
    results = {model.name: result_of(out, model.name) for model in models}
    files = {model.name: out / model.name / "model.onnx" for model in models}
    times = measure.milliseconds(files, data.as_floats(shown.test[0]))
    chosen = [number for number in SHOWN if number < len(shown.test)] or [0]
    pictures.side_by_side(files, shown, chosen, out / "stylised.jpg", photographs=photographs)
    pictures.retained([result for result in results.values() if result["budget"] is not None], out / "channels.svg")
    whole, table = results[WHOLE.name], {}
    for name, result in results.items():
        table[name] = {
            **{key: result[key] for key in ("channels", "flops", "params", "onnx bytes", "safetensors bytes")},
            "ms": times[name],
            "smaller": whole["onnx bytes"] / result["onnx bytes"],
            "smaller (safetensors)": whole["safetensors bytes"] / result["safetensors bytes"],
            "faster": times[WHOLE.name] / times[name],
            **result["test"],
        }
        if not quiet:
            print(name, {key: round(value, 4) for key, value in table[name].items()})
    write_json(out / "table.json", table)
    return {"table": table, "results": results}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with photographs, paintings and VGG-16 (see README.md)")
    parser.add_argument("--steps", type=count, default=1000, help="of the first training")
    parser.add_argument("--more", type=count, default=700, help="of each training that goes on from there")
    parser.add_argument("--side", type=int, default=128, help="of a crop")
    parser.add_argument("--batch", type=count, default=4)
    parser.add_argument("--lr", type=positive, default=2e-3)
    parser.add_argument("--shares", type=share, nargs="+", default=[0.4, 0.1], help="of the channels to keep")
    parser.add_argument(
        "--weight",
        type=positive,
        help="the paper's λ: train models by its equation 7 besides, lambda_0.4 and lambda_0.1",
    )
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast)")
    parser.add_argument("--only", help="train only this one: first, original, channels_0.4, lambda_0.4, ...")
    parser.add_argument(
        "--photographs", action="store_true", help="show them in stylised.jpg too, if they are yours to pass on"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small net on pictures made here, under a minute")
    parser.add_argument("--quiet", action="store_true")
    return parser


if __name__ == "__main__":
    main()
