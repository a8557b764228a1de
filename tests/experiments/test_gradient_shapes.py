"""Gradient shapes in quick mode, and how their distance is judged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tgfx
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


def curves_of(finals: dict[str, list[tuple[float, ...]]]) -> list[gradient_shapes.Curve]:
    return [
        gradient_shapes.Curve(shape, seed, list(range(1, len(values) + 1)), [0.5] * len(values), list(values), 0.0)
        for shape, seeds in finals.items()
        for seed, values in enumerate(seeds)
    ]


def test_the_noise_of_gradient_shapes_is_that_of_the_seeds_at_every_point() -> None:
    finals = {"constant": [(0.5, 0.9), (0.5, 0.92)], "sigmoid": [(0.6, 0.9), (0.6, 0.92)]}
    curves = curves_of({**finals, "tanh": [(0.4, 0.93), (0.4, 0.95)]})
    early, late = gradient_shapes.spreads(curves)
    assert (early.step, late.step) == (1, 2)
    assert early.apart == pytest.approx(0.2) and early.error == pytest.approx(0)
    assert late.apart == pytest.approx(0.03) and late.error == pytest.approx(0.02**0.5 / 10)
    (alone,) = gradient_shapes.spreads(curves_of({shape: [(0.5,)] for shape in gradient_shapes.SHAPES}))
    assert alone.apart == 0 and math.isnan(alone.error)


def test_the_rule_of_the_paper_moves_gates_by_their_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """Flatter gates move less; by the default rule, which takes the shape out again, all close alike."""
    curves = gradient_shapes.main(["--quick", "--rule", "paper", "--weight", "50", "--gate-lr", "0.1"])
    flops = {one.shape: one.flops[0] for one in curves}
    assert flops["constant"] <= flops["tanh"] < flops["sigmoid"] < 1
    assert "step 24: shapes at most" in capsys.readouterr().out


def test_with_adam_the_size_of_a_shape_does_not_matter() -> None:
    asked = ["--rule", "paper", "--weight", "100", "--gate-lr", "0.02", "--adam", "--lr", "0.0003"]
    ends = [one.flops[-1] for one in gradient_shapes.main(["--quick", *asked])]
    assert max(ends) - min(ends) <= 0.01 and max(ends) < 0.7


def test_each_seed_begins_the_rule_of_the_paper_with_gates_of_its_own() -> None:
    task = gradient_shapes._quick_task("paper", 1.0)

    def begun(seed: int, shape: str) -> Tensor:
        torch.manual_seed(seed)
        gated = tgfx.transform(task.model, torch.zeros(1, 3, 32, 32), gate=gradient_shapes._gates(task, shape))
        return torch.cat([gate.weight.detach() for gate in gated.gates.values()])

    first = begun(0, "constant")
    assert first.min() > 0 and first.max() <= 1 and first.std() > 0.2
    assert torch.equal(begun(0, "tanh"), first) and not torch.equal(begun(1, "constant"), first)


def test_what_was_asked_of_the_rule_of_the_paper_is_noted() -> None:
    """Results of the default rule, which has none of it, are read as before."""
    task, other = gradient_shapes._quick_task(), gradient_shapes._quick_task("paper", 10.0, 0.1)
    assert set(other.asked) - set(task.asked) == {"rule", "weight", "gate_lr", "gates"}
    assert (other.asked["rule"], other.asked["weight"], other.asked["gate_lr"]) == ("paper", 10.0, 0.1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--weight", "1"], "--rule paper"),
        (["--gate-lr", "0.1"], "--rule paper"),
        (["--rule", "paper"], "needs --weight"),
        (["--seeds", "0"], "above 0"),
        (["--steps", "0"], "above 0"),
        (["--budget", "1.5"], "at most 1"),
    ],
)
def test_options_without_effect_or_sense_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gradient_shapes.main([*options, "--quick"])
    assert complaint in capsys.readouterr().err
