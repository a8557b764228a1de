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
    least = min(*shares, 0.99)  # a line of whole models only has no width
    # not where they would cover the marks of the ends
    marks = sorted({round(share, 2) for share in shares} - {round(least, 2), 1.0})

    def place(share: float, value: float) -> tuple[str, str]:
        x = LEFT + WIDTH * (1 - share) / (1 - least)
        return f"{x:.1f}", f"{TOP + HEIGHT * (high - value) / (high - low):.1f}"

    tall = TOP + HEIGHT + 40 + 18 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{tall}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP - 10}" font-size="12">{title}, by the share of {unit} left</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{high:.1%}</text>',
        f'<text x="{LEFT - 6}" y="{TOP + HEIGHT}" text-anchor="end">{low:.1%}</text>',
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 16}">1</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">{least:.2f}</text>',
    ]
    for share in marks:
        x, _ = place(share, low)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{TOP + HEIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{share:.2f}</text>')
    for value in _round_values(low, high):
        _, y = place(1, value)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.0%}</text>')
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


def _round_values(low: float, high: float) -> list[float]:
    """Whole percents to mark between the ends, six at the most, and none that would cover an end's own mark."""
    room = (high - low) / 12
    for step in (1, 2, 5, 10, 20):
        found = [value / 100 for value in range(0, 101, step) if low + room < value / 100 < high - room]
        if len(found) <= 6:
            return found
    return []
