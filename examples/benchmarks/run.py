"""Run the benchmarks; each writes its own section of RESULTS.md.

make bench
python -m examples.benchmarks.run growth              only this one, nothing is written
python -m examples.benchmarks.run growth --update     only this one, its section is written anew
python -m examples.benchmarks.run compaction --data CIFAR --weights resnet56.th       with a trained model
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from examples.benchmarks.budget_error import budget_error
from examples.benchmarks.compaction import Trained, compaction
from examples.benchmarks.growth import growth
from examples.benchmarks.latency import latency
from examples.benchmarks.rules import rules
from examples.benchmarks.scaling import scaling
from examples.benchmarks.tables import Table
from examples.benchmarks.training_step import training_step
from examples.benchmarks.transform_time import transform_time
from examples.benchmarks.viewer import viewer
from examples.benchmarks.weight_memory import weight_memory
from examples.zoo.run import write

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "# Benchmarks\n\nWritten by `make bench`. Figures are ratios where they can be.\n"
_SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
COMMAND = "python -m examples.benchmarks.run"
BENCHMARKS: dict[str, Callable[[], Table]] = {
    "transform_time": transform_time,
    "training_step": training_step,
    "growth": growth,
    "rules": rules,
    "budget_error": budget_error,
    "weight_memory": weight_memory,
    "scaling": scaling,
    "compaction": compaction,
    "viewer": viewer,
    "latency": latency,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--update", action="store_true", help="write the sections of these benchmarks anew")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another page than RESULTS.md")
    parser.add_argument("--data", type=Path, help="for compaction: folder with CIFAR-10 (see examples/resnet56)")
    parser.add_argument("--weights", type=Path, help="for compaction: those of a ResNet-56 trained on CIFAR-10")
    options = parser.parse_args()
    if (options.data is None) != (options.weights is None):
        parser.error("--data and --weights go together: the weights were trained on these images")
    benchmarks = dict(BENCHMARKS)
    if options.data is not None:
        benchmarks["compaction"] = partial(compaction, Trained(options.data, options.weights))
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    for name in options.names or benchmarks:
        print(f"{name} ...", flush=True)
        where = _where()
        table = benchmarks[name]()
        print(table.conclusion, flush=True)
        if options.update or not options.names:
            update(options.output, name, f"{table.markdown()}\n{where}\n")
            print(f"written: {options.output}")


def update(page: Path, name: str, text: str) -> None:
    """Put a benchmark's section into the page, in the place of its last one; sections are in the order of the table."""
    sections = dict(_SECTION.findall(page.read_text())) if page.exists() else {}
    sections[name] = text
    known = [one for one in BENCHMARKS if one in sections]
    write(page, HEAD + "".join(f"\n<!-- {one} -->\n{sections[one]}<!-- end -->\n" for one in known))


def _where() -> str:
    """The load tells whether other jobs ran at the same time."""
    load = f", load average {os.getloadavg()[0]:.1f} before the start" if hasattr(os, "getloadavg") else ""
    return f"({os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}{load})"


if __name__ == "__main__":
    main()
