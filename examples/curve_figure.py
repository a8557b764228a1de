"""Accuracy against what is left of a model, a line for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#2a6fbb", "#8db4dd", "#d1651f", "#e8b28c", "#3a8f4d", "#9fc9aa")
WIDTH, HEIGHT, LEFT, TOP = 420, 240, 60, 30
Line = Sequence[tuple[float, float]]


def draw(lines: Mapping[str, Line], path: Path, *, title: str, unit: str) -> None:
    """`lines`: (share left, accuracy) by the name of a run. `unit`: of what a share is left."""
    shares, values = zip(*(point for line in lines.values() for point in line), strict=True)
    low, high = min(values), max(values)
    high = high if high > low else low + 1e-3
    least = min(shares)

    def place(share: float, value: float) -> tuple[str, str]:
        x = LEFT + WIDTH * (1 - share) / (1 - least)
        return f"{x:.1f}", f"{TOP + HEIGHT * (high - value) / (high - low):.1f}"

    tall = TOP + HEIGHT + 40 + 18 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{tall}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP - 10}" font-size="12">{title}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{high:.1%}</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">{low:.1%}</text>',
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 16}">all {unit}</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">{least:.2f} of them</text>',
    ]
    for index, (run, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        dots = [place(*point) for point in line]
        joined = " ".join(",".join(dot) for dot in dots)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in dots]
        below = TOP + HEIGHT + 38 + 18 * index
        parts.append(f'<rect x="{LEFT}" y="{below}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{below + 5}">{run}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))
