"""Optical flow with FlowNetSimple at a budget of channels (the paper's Table 3).

python -m examples.flownet.run --data DATA --out OUT base                    the net itself
python -m examples.flownet.run --data DATA --out OUT further                 some more, whole
python -m examples.flownet.run --data DATA --out OUT further --channels 0.45 the same steps, with gates
python -m examples.flownet.compare OUT                                       sizes, errors and times beside each other
python -m examples.flownet.run --quick                                       all of it, small, on images made here
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import tgfx
from examples.flownet.error import end_point_errors, multiscale_error, still_error
from examples.flownet.model import FlowNetSimple
from examples.flownet.pairs import PairBatches, Pairs, made_pairs, read_chairs
from examples.flownet.photos import digest_of, made_photos, read_photos
from examples.mistakes import without_traceback
from examples.options import count, positive, share
from examples.stage import Stage, digest

TRAIN_SEED, HELD_OUT_SEED = 1, 2
STRIDE = 64  # of the net
QUICK_SPEED = 0.1  # motions of about a pixel, which is what a small net learns first


@dataclass(frozen=True)
class Data:
    """Pairs to train on, and pairs that no training sees: real ones, and made from other photographs."""

    train: Pairs
    chairs: Pairs
    held_out: Pairs
    photographs: list[str]  # digests of those that pairs were made from, to train on and held out

    @property
    def digest(self) -> list[str]:
        """Of the number of pairs, and of the first ones: each pair is drawn by its own number."""
        return [
            f"{len(pairs)} of {digest(*pairs.batch(slice(0, 2)))}" for pairs in (self.train, self.chairs, self.held_out)
        ]


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    options = parser.parse_args(arguments)
    if any(side < 1 or side % STRIDE for side in options.crop):
        parser.error(f"--crop: multiples of {STRIDE}, the net halves six times; not {options.crop}")
    torch.set_num_threads(options.threads)
    if options.quick:
        return _quick(options)
    if options.data is None or options.stage is None:
        raise SystemExit("a stage (base or further) and --data are needed: see examples/flownet/README.md, or --quick")
    if options.stage == "base" and _budget(options) is not None:
        raise SystemExit("budgets are for the stage `further`: the base is trained whole")
    _base_of(options)  # before pairs are made
    return run_stage(options, _load(options))


def run_stage(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Train the net for a number of steps, cut it if there is a budget, measure and store it."""
    torch.manual_seed(options.seed)
    model = FlowNetSimple(options.width)
    base = _base_of(options)
    if base is not None:
        model.load_state_dict(load_file(base))
    asked = {**_asked(options), "begins": digest(model), "pairs": data.digest, "photographs": data.photographs}
    stage = Stage(options.out / _name(options), asked, later=["photographs"])
    folder = stage.folder
    done = stage.begin()
    if done is not None:
        if not options.quiet:
            print(f"{stage.result} is there already", flush=True)
        return done
    before = _means(_errors(model, data))
    gated, result = _trained(options, model, data, stage)
    stage.trained(result)
    budget = _budget(options)
    compact = _cut(gated, budget)
    errors = _errors(compact, data)
    figures = {
        **_stored(gated.eval(), compact, data, folder),
        "still": {"chairs": still_error(data.chairs), "held_out": still_error(data.held_out)},
        "before": before,
        "epe": _means(errors),
        "epe_of_pairs": errors,
        "loss": [row["loss"] for row in result.history.rows][:: max(1, len(result.history.rows) // 20)],
        "train_pairs": len(data.train),
        "seconds": round(result.seconds),
    }
    report = stage.write(figures)
    if not options.quiet:
        print({key: value for key, value in report.items() if key not in ("retained", "loss", "epe_of_pairs")})
    return report


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    same = ("stage", "width", "steps", "batch", "crop", "lr", "clip", "bf16", "seed")
    return {**{name: getattr(options, name) for name in same}, "budget": _budget(options)}


def _trained(
    options: argparse.Namespace, model: FlowNetSimple, data: Data, stage: Stage
) -> tuple[tgfx.GatedModule, tgfx.FitResult]:
    # prices are those of the size that is reported
    gated = tgfx.transform(model, torch.randn(1, 6, *data.chairs.images.shape[-2:]))
    budget = _budget(options)
    if "latency" in (budget or {}):
        gated.use_latency(_latency_table(gated, stage.folder / "latency.csv"))
    result = tgfx.fit(
        gated,
        PairBatches(data.train, options.crop, options.batch, seed=options.seed),
        multiscale_error,
        budget=budget,
        steps=options.steps,
        optimizer=torch.optim.Adam(tgfx.param_groups(gated, lr=options.lr)),
        amp=torch.bfloat16 if options.bf16 else None,
        clip=options.clip,
        checkpoint=stage.checkpoint,
        checkpoint_every=500,
        log=stage.folder / "log",
        log_every=options.log_every,
        progress=not options.quiet,
        seed=options.seed + (options.stage == "further"),  # further steps see other crops than the base did
    )
    return gated, result


def _cut(gated: tgfx.GatedModule, budget: dict[str, float] | None) -> torch.nn.Module:
    with warnings.catch_warnings():
        # the coarse flows of train mode go, as they should: what is cut is only asked from now on
        warnings.filterwarnings("ignore", message="FlowNetSimple takes another path in train mode")
        return (tgfx.shrink(gated) if budget is None else tgfx.finish(gated, budget).model).eval()


def _stored(gated: tgfx.GatedModule, compact: torch.nn.Module, data: Data, folder: Path) -> dict[str, Any]:
    """Files of the cut net: their sizes, what the net costs, and how far its answers are from the gated one's."""
    images, _ = data.chairs.batch(slice(0, 1))
    with torch.no_grad():
        delta = (gated(images) - compact(images)).abs().max().item()
    weights = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in compact.state_dict().items()}, weights)
    exported = tgfx.export_onnx(compact, folder / "model.onnx", images, measure=False)
    return {
        **{kind: gated.ratio(kind).item() for kind in ("channels", "flops", "params")},
        "flops_count": round(gated.cost("flops").item()),
        "params_count": sum(parameter.numel() for parameter in compact.parameters()),
        "size": list(images.shape[-2:]),
        "safetensors_bytes": weights.stat().st_size,
        "onnx_bytes": exported.bytes,
        "onnx_delta": max(exported.max_delta.values()),
        "gated_compact_delta": delta,
        "retained": {name: [gate.open_count(), len(gate.weight)] for name, gate in gated.gates.items()},
    }


def _errors(model: torch.nn.Module, data: Data) -> dict[str, list[float]]:
    return {"chairs": end_point_errors(model, data.chairs), "held_out": end_point_errors(model, data.held_out)}


def _means(errors: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.mean(own) for name, own in errors.items()}


def _budget(options: argparse.Namespace) -> dict[str, float] | None:
    shares = {kind: getattr(options, kind) for kind in ("channels", "latency") if getattr(options, kind) is not None}
    return shares or None


def _base_of(options: argparse.Namespace) -> Path | None:
    """The weights that this stage goes on from."""
    if options.stage == "base":
        return None
    file = Path(options.out / "base" / "weights.safetensors")
    if not file.is_file():
        raise SystemExit(f"{file} is missing: run the stage `base` with the same --out first")
    return file


def _latency_table(gated: tgfx.GatedModule, path: Path) -> tgfx.latency.LatencyTable:
    """Measured once: a run that goes on needs the table that it was begun with."""
    if not path.exists():
        tgfx.latency.measure(gated).to_csv(path)
    return tgfx.latency.read_csv(path)


def _name(options: argparse.Namespace) -> str:
    if options.stage == "base":
        return "base"
    budget = _budget(options) or {}
    return "-".join(f"{kind}-{share:.2f}" for kind, share in budget.items()) or "whole"


def _load(options: argparse.Namespace) -> Data:
    chairs = read_chairs(options.data / "flyingchairs")
    # a crop moves within its pair, so that a pair can be used many times
    size = (options.crop[0] + 64, options.crop[1] + 64)
    photos = read_photos(options.data / "bsds500" / "train")
    train = made_pairs(photos, size, options.pairs, TRAIN_SEED, options.out / "pairs")
    others = read_photos(options.data / "bsds500" / "test")
    held_out = made_pairs(others, chairs.images.shape[-2:], 50, HELD_OUT_SEED, options.out / "held_out")
    return Data(train, chairs, held_out, [digest_of(photos), digest_of(others)])


def _quick(options: argparse.Namespace) -> dict[str, Any]:
    """Base, whole and two budgets of a narrow net; made pairs stand in for FlyingChairs."""
    options.width, options.crop, options.batch, options.lr, options.steps = 0.125, (64, 64), 8, 5e-3, 120
    photos, others = made_photos(6), made_photos(3, seed=1)
    data = Data(
        made_pairs(photos, (80, 80), 80, TRAIN_SEED, speed=QUICK_SPEED),
        made_pairs(others, (64, 64), 8, HELD_OUT_SEED, speed=QUICK_SPEED),
        made_pairs(others, (64, 64), 8, HELD_OUT_SEED + 1, speed=QUICK_SPEED),
        [digest_of(photos), digest_of(others)],
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        options.out = Path(folder)
        for options.stage, options.channels in (("base", None), ("further", None), ("further", 0.6), ("further", 0.45)):
            results[_name(options)] = run_stage(options, data)
            options.lr, options.steps = 1e-3, 30
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("base", "further"), nargs="?")
    parser.add_argument("--data", type=Path, help="folder with bsds500/ and flyingchairs/ (see README.md)")
    parser.add_argument("--out", type=Path, default=Path("runs/flownet"))
    parser.add_argument("--channels", type=share, help="share of the channels to keep; without, the net stays whole")
    parser.add_argument("--latency", type=share, help="share of ONNX Runtime's time to keep, besides or instead")
    parser.add_argument("--width", type=positive, default=0.375, help="of the layers, 1 is the published net")
    parser.add_argument("--pairs", type=count, default=3000, help="to make and train on")
    parser.add_argument("--crop", type=int, nargs=2, default=(192, 256), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batch", type=count, default=4)
    parser.add_argument("--steps", type=count, default=10000)
    parser.add_argument("--lr", type=positive, default=5e-4)
    parser.add_argument("--clip", type=positive, help="largest gradient norm")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast); errors are of float32")
    parser.add_argument("--log-every", type=count, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--quick", action="store_true", help="a narrow net on images made here, under a minute")
    parser.add_argument("--quiet", action="store_true")
    return parser


if __name__ == "__main__":
    main()
