"""The results of a folder as rows for the README: python -m examples.translation.table FOLDER"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from examples.mistakes import without_traceback
from examples.stage import read_json

SCORE = "bleu_test_2016_flickr"


def rows(results: dict[str, dict[str, Any]]) -> list[str]:
    """One row a model; Δ against `whole`."""
    lines = [
        "| | En/De/En-De | heads | BLEU test | BLEU val | Δ test, val | params | FLOPs | decoding | forward | s |",
        "|---" * 11 + "|",
    ]
    rates = results.get("speed", {}).get("pieces_per_second", {})
    for step, own in results.items():
        if step == "speed":
            continue
        cells = [
            step,
            "/".join(str(count) for count in own["kept"].values()),
            f"{own['heads']:.4f}",
            f"{own[SCORE]:.2f}",
            f"{own['bleu_val']:.2f}",
            "" if step == "whole" else _difference(own, results.get("whole")),
            f"{own['params']:.3f}",
            f"{own['flops']:.3f}",
            *(_ratio(rates.get(step), use) for use in ("decoding", "forward")),
            str(own["wall"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _difference(own: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None:
        return ""
    return ", ".join(f"{own[name] - other[name]:+.2f}" for name in (SCORE, "bleu_val"))


def _ratio(rates: dict[str, Any] | None, use: str) -> str:
    return "" if rates is None else f"{rates[use]:.0f}/s, × {rates[f'{use}_ratio']:.2f}"


@without_traceback()
def main(folder: Path) -> None:
    order = {"whole": 0, "speed": 9}
    steps = sorted(folder.glob("*/result.json"), key=lambda file: (order.get(file.parent.name, 2), file.parent.name))
    print("\n".join(rows({file.parent.name: read_json(file) for file in steps})))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the --out of examples.translation.run")
    main(parser.parse_args().folder)
