"""Run the benchmarks and write RESULTS.md.

make bench
python -m examples.benchmarks.run growth          only this one, nothing is written
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from examples.benchmarks.budget_error import budget_error
from examples.benchmarks.compaction import compaction
from examples.benchmarks.growth import growth
from examples.benchmarks.latency import latency
from examples.benchmarks.rules import rules
from examples.benchmarks.scaling import scaling
from examples.benchmarks.tables import Table
from examples.benchmarks.training_step import training_step
from examples.benchmarks.transform_time import transform_time
from examples.benchmarks.weight_memory import weight_memory
from examples.zoo.run import write

RESULTS = Path(__file__).with_name("RESULTS.md")
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
    "latency": latency,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--output", type=Path, help="write the page here, even for some of the benchmarks")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    head = _head(options.names)
    tables = []
    for name in options.names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        tables.append(BENCHMARKS[name]())
        print(tables[-1].conclusion, flush=True)
    output = options.output or (None if options.names else RESULTS)
    if output:
        write(output, "\n".join([head, *(table.markdown() for table in tables)]))
        print(f"written: {output}")


def _head(names: list[str]) -> str:
    """Where and how: the load tells whether other jobs ran at the same time."""
    command = " ".join([COMMAND, *names])
    load = f"load average {os.getloadavg()[0]:.1f} before the start" if hasattr(os, "getloadavg") else ""
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, {load}"
    return f"# Benchmarks\n\nWritten by `{command}` on {machine}. Figures are ratios where they can be.\n"


if __name__ == "__main__":
    main()
