"""Gradient shapes in quick mode, and how their distance is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gradient_shapes import run as gradient_shapes
from examples.gradient_shapes.figure import draw


def test_gradient_shapes_quick(tmp_path: Path) -> None:
    curves = gradient_shapes.main(["--quick"])
    assert [one.shape for one in curves] == list(gradient_shapes.SHAPES)
    for one in curves:
        assert one.steps == [4, 8, 12, 16, 20, 24]
        assert 0.59 <= one.flops[-1] <= 0.6
        assert one.flops[0] > 0.7 and max(one.flops[4:]) <= 0.6  # falls to the budget and stays there
    assert all(one.accuracy[-1] > 0.15 for one in curves)  # ten classes; the net starts untrained
    draw(curves, gradient_shapes.SHAPES, tmp_path / "shapes.svg")
    assert (tmp_path / "shapes.svg").read_text().count("<polyline") == 6


def test_the_noise_of_gradient_shapes_is_that_of_the_seeds() -> None:
    finals = {"constant": (0.9, 0.92), "sigmoid": (0.9, 0.92), "tanh": (0.93, 0.95)}
    curves = [
        gradient_shapes.Curve(shape, seed, [1], [0.5], [value], 0.0)
        for shape, values in finals.items()
        for seed, value in enumerate(values)
    ]
    apart, noise = gradient_shapes.spreads(curves)
    assert apart == pytest.approx(0.03) and noise == pytest.approx(0.02**0.5 / 10)
