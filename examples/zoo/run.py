"""Check every model of the zoo and write COVERAGE.md.

make zoo
python -m examples.zoo.run 'torchvision/resnet*' hf/bert      only these, nothing is written
python -m examples.zoo.run 'timm/*' --output timm.md          only these, written there
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from examples.zoo import coverage
from examples.zoo.check import Verdict
from tgfx.whole_file import whole_file

COVERAGE = Path(__file__).with_name("COVERAGE.md")
console = Console(soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    wanted = list(names(options.patterns))
    if not wanted:
        console.print(f"no model of the zoo matches {' '.join(options.patterns)}")
        return 2
    verdicts = []
    for verdict in checked(wanted, options.workers):
        verdicts.append(verdict)
        _show(verdict, len(verdicts), len(wanted))
    failing = [verdict for verdict in verdicts if verdict.failures]
    output = options.output or (None if options.patterns else COVERAGE)
    if output is not None:
        write(output, coverage.page(verdicts))
        console.print(f"written: {output}")
    console.print(f"{len(verdicts) - len(failing)} exact, {len(failing)} failing")
    for verdict in failing:
        console.print(f"  {verdict.name}: {'; '.join(verdict.failures)}")
    return 1 if failing else 0


def names(patterns: Sequence[str]) -> Iterator[str]:
    from examples.zoo.loading import models

    for name in models():
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            yield name


def checked(wanted: Sequence[str], workers: int) -> Iterator[Verdict]:
    """Verdicts as they come. A worker process that dies takes only its own model along."""
    left = dict.fromkeys(wanted)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(verdict_of, name): name for name in wanted}
        for future in as_completed(futures):
            with suppress(BrokenProcessPool):
                yield future.result()
                del left[futures[future]]
    # A worker that died has ended its pool. What is left goes one by one, each in a pool of its own.
    for name in left:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                yield pool.submit(verdict_of, name).result()
            except BrokenProcessPool:
                yield Verdict(name, failures=["its process died (out of memory?)"])


def verdict_of(name: str) -> Verdict:
    """One model, guarded: whatever it raises is its verdict, not the end of the run."""
    import torch

    from examples.zoo.check import check
    from examples.zoo.loading import models

    torch.set_num_threads(1)  # the workers share the cores
    torch.manual_seed(0)
    try:
        model, example = models()[name]()
        return check(name, model, example)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines() or [""]
        message = f"{type(error).__name__}: {text[0][:160]} ({Path(where.filename).name}:{where.lineno})"
        return Verdict(name, failures=[message])


def write(path: Path, text: str) -> None:
    """Aside first: a run that is stopped leaves the old page whole."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _show(verdict: Verdict, done: int, total: int) -> None:
    state = f"[red]{'; '.join(verdict.failures)}[/red]" if verdict.failures else "[green]exact[/green]"
    figures = f"{verdict.seconds:6.1f} s  {verdict.gates:6d} gates  {verdict.removed:4.0%} removed"
    console.print(f"{done:3d}/{total}  {verdict.name:48s} {figures}  {state}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.zoo.run", description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", help="names or glob patterns; all models if left out")
    parser.add_argument("--output", type=Path, help="write the page here, even for a part of the zoo")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
