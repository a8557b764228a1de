"""Accuracy and FLOPs against steps, one colour per shape, one line per seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

COLOURS = ("#2a6fbb", "#d1651f", "#3a9a4b")
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 200, 50, 30, 70


class Drawn(Protocol):
    shape: str
    steps: list[int]
    flops: list[float]
    accuracy: list[float]


def draw(curves: Sequence[Drawn], shapes: Sequence[str], path: Path) -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (WIDTH + GAP) + LEFT}" height="{HEIGHT + 90}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    titles = {"accuracy": "test accuracy", "flops": "FLOPs left"}
    for panel, (name, title) in enumerate(titles.items()):
        parts += _panel(curves, shapes, name, title, LEFT + panel * (WIDTH + GAP))
    for index, shape in enumerate(shapes):
        x = LEFT + index * 110
        parts.append(f'<rect x="{x}" y="{TOP + HEIGHT + 38}" width="12" height="3" fill="{COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 18}" y="{TOP + HEIGHT + 43}">{shape}{"" if shape == "constant" else "′"}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))


def _panel(curves: Sequence[Drawn], shapes: Sequence[str], name: str, title: str, left: int) -> list[str]:
    values = [value for curve in curves for value in getattr(curve, name)]
    low, high = min(values), max(values)
    high = high if high > low else low + 1e-3
    last = max(step for curve in curves for step in curve.steps)
    parts = [
        f'<text x="{left}" y="{TOP - 10}" font-size="12">{title}</text>',
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{left - 6}" y="{TOP + 8}" text-anchor="end">{high:.3f}</text>',
        f'<text x="{left - 6}" y="{TOP + HEIGHT}" text-anchor="end">{low:.3f}</text>',
        f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">{last} steps</text>',
    ]
    for curve in curves:
        places = [
            f"{left + WIDTH * step / last:.1f},{TOP + HEIGHT * (high - value) / (high - low):.1f}"
            for step, value in zip(curve.steps, getattr(curve, name), strict=True)
        ]
        colour = COLOURS[shapes.index(curve.shape)]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts
