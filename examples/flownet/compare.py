"""The stages of a run beside each other: sizes, errors, and ONNX Runtime's times taken in turns.

python -m examples.flownet.compare OUT
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.mistakes import without_traceback
from examples.options import count
from examples.stage import read_json, write_json

TURNS = 40
WARM_UP = 3


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder that examples.flownet.run was given as --out")
    parser.add_argument("--turns", type=count, default=TURNS)
    options = parser.parse_args(arguments)
    if not options.out.is_dir():
        raise SystemExit(f"{options.out} is no folder")
    folders = [folder for folder in sorted(options.out.iterdir()) if (folder / "result.json").is_file()]
    names = [folder.name for folder in folders if folder.name != "base"]
    if "whole" not in names:
        raise SystemExit(f"{options.out} holds no finished stage `further` without a budget to compare with")
    names = ["whole", *sorted((name for name in names if name != "whole"), reverse=True)]
    results = {name: read_json(options.out / name / "result.json") for name in names}
    times = milliseconds([options.out / name / "model.onnx" for name in names], options.turns)
    report = {
        name: {
            "epe": results[name]["epe"],
            "epe_more": _more(results[name]["epe_of_pairs"], results["whole"]["epe_of_pairs"]),
            "safetensors_bytes": results[name]["safetensors_bytes"],
            "onnx_bytes": results[name]["onnx_bytes"],
            "flops": results[name]["flops"],
            "params": results[name]["params"],
            "ms": statistics.median(own),
            "faster": statistics.median(whole / mine for whole, mine in zip(times[0], own, strict=True)),
        }
        for name, own in zip(names, times, strict=True)
    }
    write_json(options.out / "compare.json", report)
    print("\n".join(rows(report)))
    return report


def _more(own: dict[str, list[float]], whole: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of both kinds of pairs: how much more the net errs than the whole one, in the mean, and its standard error."""
    gaps = {kind: [a - b for a, b in zip(own[kind], whole[kind], strict=True)] for kind in own}
    return {kind: [statistics.mean(gap), statistics.stdev(gap) / len(gap) ** 0.5] for kind, gap in gaps.items()}


def milliseconds(models: Sequence[Path], turns: int) -> list[list[float]]:
    """Of each model, one number a turn: processor time on one thread, which leaves out what other jobs take."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"]) for path in models]
    (value,) = sessions[0].get_inputs()
    image = np.random.default_rng(0).uniform(-0.45, 0.55, (1, *value.shape[1:])).astype(np.float32)
    times: list[list[float]] = [[] for _ in models]
    for turn in range(WARM_UP + turns):
        for session, own in zip(sessions, times, strict=True):
            began = time.process_time()
            session.run(None, {value.name: image})
            if turn >= WARM_UP:
                own.append(1000 * (time.process_time() - began))
    return times


def rows(report: dict[str, Any]) -> list[str]:
    """As Markdown."""
    errors, files = ("EPE chairs", "more", "EPE made", "more"), ("safetensors MB", "ONNX MB")
    titles = ("", *errors, *files, "params", "FLOPs", "ms", "faster")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in report.items():
        megabytes = (f"{row[key] / 1e6:.2f}" for key in ("safetensors_bytes", "onnx_bytes"))
        shares = (f"{row[key]:.3f}" for key in ("params", "flops"))
        found = [
            text
            for key in ("chairs", "held_out")
            for text in (f"{row['epe'][key]:.3f}", "{:+.3f} ± {:.3f}".format(*row["epe_more"][key]))
        ]
        cells = (name, *found, *megabytes, *shares, f"{row['ms']:.1f}", f"{row['faster']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
