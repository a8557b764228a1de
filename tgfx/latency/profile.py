"""Time against one number of channels, for every count, from measurements at some of them.

Runtimes work in blocks of 4, 8 or 16 channels, so time against channels is a smooth trend times a pattern that repeats
every PERIOD channels. What is measured is kept to the letter. Between: the trend is linear between counts that are
whole blocks, and a count off the blocks takes the ratio to the trend that its residue had where it was measured. Below
the first whole block it is linear between what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

PERIOD = 16  # covers blocks of 4, 8 and 16 channels
MOST = 8.0  # times the trend, at most: a ratio of two small times is no guide for large ones


def filled(known: Mapping[int, float], size: int, period: int = PERIOD) -> np.ndarray:
    """Times for 0 (nothing, no time) to `size` channels; `known` holds some, `size` among them."""
    counts = np.arange(size + 1)
    blocks = sorted(n for n in known if n % period == 0 or n == size)
    trend = np.interp(counts, blocks, [known[n] for n in blocks])
    off = {n: time / trend[n] for n, time in known.items() if n > blocks[0] and n not in blocks}
    values = trend * _ratios(off, counts, period)
    few = sorted(n for n in known if n <= blocks[0])
    values[: blocks[0]] = np.interp(counts[: blocks[0]], few, [known[n] for n in few])
    for n, time in known.items():
        values[n] = time
    values[0] = 0.0
    return values


def _ratios(measured: Mapping[int, float], counts: np.ndarray, period: int) -> np.ndarray:
    """Per count the ratio to the trend: interpolated between measured counts of the same residue."""
    classes: dict[int, list[int]] = {}
    for n in sorted(measured):
        classes.setdefault(n % period, []).append(n)
    ratios = np.ones(len(counts))
    for residue in range(1, period):
        own = classes.get(_like(residue, classes, period), [])
        if own:
            at = counts[residue::period]
            ratios[residue::period] = np.interp(at, own, [min(measured[n], MOST) for n in own])
    return ratios


def _like(residue: int, classes: Mapping[int, object], period: int) -> int:
    """The measured residue that is most alike: itself, or the next one that is divisible by the same."""
    alike = [r for r in classes if math.gcd(r, period) == math.gcd(residue, period)]
    return min(alike, key=lambda r: (r != residue, abs(r - residue), -r), default=-1)
