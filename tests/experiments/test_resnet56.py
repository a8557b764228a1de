"""ResNet-56 in quick mode."""

from __future__ import annotations

import pytest

from examples.resnet56 import curve
from examples.resnet56 import run as resnet56


@pytest.mark.parametrize("train", ["joint", "gates"])
def test_resnet56_quick(train: str) -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", train])
    assert report["steps"] == 12
    assert 0.55 <= report["flops"] <= 0.6
    assert 0 <= report["compact"] <= 1
    assert all(width > 0 for width in report["widths"].values())


def test_resnet56_curve_quick() -> None:
    points = curve.main(["--quick"])
    assert [(point.run, point.share) for point in points] == [(run, s) for run in curve.RUNS for s in (0.8, 0.6)]
    for point in points:
        assert point.share - 0.05 <= point.flops <= point.share
        assert 0 <= point.accuracy <= 1


def test_resnet56_taught_in_bfloat16() -> None:
    """The losses that ask the original model, and a schedule of one's own."""
    report = resnet56.main(["--quick", "--quiet", "--loss", "taught", "--bf16", "--close", "0.3"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["loss"] == "taught" and report["bf16"]
