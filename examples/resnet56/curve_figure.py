"""Accuracy against the FLOPs left, a line for each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

COLOURS = ("#2a6fbb", "#d1651f", "#3a8f4d")
WIDTH, HEIGHT, LEFT, TOP = 420, 240, 60, 30


class Drawn(Protocol):
    @property
    def run(self) -> str: ...
    @property
    def flops(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


def draw(points: Sequence[Drawn], whole: float, path: Path) -> None:
    runs = list(dict.fromkeys(point.run for point in points))
    low, high = min(point.accuracy for point in points), max(whole, *(point.accuracy for point in points))
    high = high if high > low else low + 1e-3
    least = min(point.flops for point in points)

    def place(flops: float, right: float) -> str:
        x = LEFT + WIDTH * (1 - flops) / (1 - least)
        return f"{x:.1f},{TOP + HEIGHT * (high - right) / (high - low):.1f}"

    tall = TOP + HEIGHT + 40 + 18 * len(runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{tall}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP - 10}" font-size="12">test accuracy, convolutions frozen</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{high:.1%}</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">{low:.1%}</text>',
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 16}">all FLOPs</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">{least:.2f} of them</text>',
    ]
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        own = [(1.0, whole), *((point.flops, point.accuracy) for point in points if point.run == run)]
        dots = [place(*one) for one in own]
        parts.append(f'<polyline points="{" ".join(dots)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for dot in dots:
            x, y = dot.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
        y = TOP + HEIGHT + 38 + 18 * index
        parts.append(f'<rect x="{LEFT}" y="{y}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{y + 5}">batch norm\'s statistics {run}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))
