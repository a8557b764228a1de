"""Counts worth stopping at, where the cost of 0, 1, 2 ... channels has steps and may even fall."""

from __future__ import annotations

import numpy as np

TOLERANCE = 0.03  # measurements vary about as much


def envelope(values: np.ndarray) -> np.ndarray:
    """The least time for at least so many channels: it never falls."""
    least = np.minimum.accumulate(values[::-1])[::-1].copy()
    least[0] = values[0]
    return least


def fast_counts(values: np.ndarray, tolerance: float = TOLERANCE) -> list[int]:
    """Counts worth stopping at, rising: each takes clearly less time than the next one, and so than any above it.

    The last is the whole; below the first, fewer channels save nothing. Not among them is a count that lies clearly
    above the line between its neighbours: with 33 channels at nearly the price of 40, it is 32 or 40.
    """
    if not values[-1] > 0:  # costs nothing at any count
        return list(range(1, len(values)))
    counts = [len(values) - 1]
    for n in range(len(values) - 2, 0, -1):
        if values[n] <= (1 - tolerance) * values[counts[-1]]:
            counts.append(n)
    counts.reverse()
    while len(counts) > 2:
        excess = _above_line(values, counts)
        worst = int(excess.argmax())
        if excess[worst] <= tolerance:
            break
        del counts[worst + 1]
    return counts


def _above_line(values: np.ndarray, counts: list[int]) -> np.ndarray:
    """How far each inner count is above the line between its two neighbours, as a share of its own value."""
    n = np.array(counts)
    low, own, high = n[:-2], n[1:-1], n[2:]
    line = values[low] + (values[high] - values[low]) * (own - low) / (high - low)
    return 1 - line / values[own]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Straight lines between fast counts."""
    stops = [0, *fast_counts(values)]
    return np.interp(np.arange(len(values)), stops, values[stops])
