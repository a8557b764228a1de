"""The verdicts as a page of Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch

from examples.zoo.check import Verdict

HEADER = """# Coverage

{exact} of {total} models exact, {failing} failing. {gates:,} gated channels in all. With half of all atoms
closed at random, the median model loses {removed:.0%} of its parameters.

Written by `make zoo` (torch {torch}). For every model, with batch-norm statistics and constant parameters
randomised first: *identity* is the largest |gated − model| with all gates open, *cut* the largest
|compact − gated| with each atom closed with probability ½, both over the largest output. The FLOPs (2 x
multiply-adds per sample in convolutions and fully-connected layers, as `FlopCounterMode` counts them on the
compact model) and the number of parameters must be the promised ones to the integer, and closing the gates
must change the output. *Removed* is the share of parameters that the cut took, *transform* is in processor
seconds. *Kept* lists layers whose
channels stay, and why; the layer that makes the output always stays and is left out.

| model | front end | gated channels | identity | cut | removed | transform, s | kept | verdict |
|---|---|---:|---:|---:|---:|---:|---|---|
"""


def page(verdicts: Sequence[Verdict]) -> str:
    """Sorted by name, failures first."""
    ordered = sorted(verdicts, key=lambda v: (not v.failures, v.name))
    failing = sum(bool(v.failures) for v in verdicts)
    removed = sorted(v.removed for v in verdicts if not v.failures)
    head = HEADER.format(
        exact=len(verdicts) - failing,
        total=len(verdicts),
        failing=failing,
        gates=sum(v.gates for v in verdicts),
        removed=removed[len(removed) // 2] if removed else 0.0,
        torch=torch.__version__.partition("+")[0],
    )
    return head + "".join(_row(v) for v in ordered)


def _row(v: Verdict) -> str:
    verdict = "; ".join(v.failures) or "exact"
    cells = [
        v.name,
        v.front_end,
        f"{v.gates:,}",
        f"{v.identity:.1e}" if v.identity else "0",
        f"{v.exactness:.1e}" if v.exactness else "0",
        f"{v.removed:.0%}",
        f"{v.seconds:.1f}",
        reasons(v.frozen),
        verdict,
    ]
    return "| " + " | ".join(_one_line(cell) for cell in cells) + " |\n"


def reasons(frozen: Sequence[str]) -> str:
    """`layer: reason at node [op] (file:line)` of every kept group, grouped by reason and without places."""
    counted: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entry in frozen:
        layer, _, reason = entry.partition(": ")
        reason = re.sub(r" at \S+( \[.*?\])?( \(.*\))?$", "", reason)
        if reason == "makes the model's output":
            continue
        counted[reason] += 1
        first.setdefault(reason, layer)
    return "; ".join(
        f"{first[reason]}{f' and {n - 1} more' if n > 1 else ''}: {reason}" for reason, n in counted.items()
    )


def _one_line(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
