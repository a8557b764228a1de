"""ResNet-56 in quick mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.cifar10 import data
from examples.resnet56 import curve
from examples.resnet56 import run as resnet56


@pytest.mark.parametrize("train", ["joint", "gates"])
def test_resnet56_quick(train: str) -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", train])
    assert report["steps"] == 12
    assert 0.55 <= report["flops"] <= 0.6
    assert 0 <= report["compact"] <= 1
    assert all(width > 0 for width in report["widths"].values())


def test_resnet56_quick_with_gates_over_connections() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "gates", "--granularity", "connection"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["granularity"] == "connection"
    assert any(name.endswith("#2") for name in report["widths"])  # what a layer reads, beside what it makes


def test_resnet56_quick_with_gates_over_taps() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "gates", "--granularity", "tap"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["loss"] == "probe"
    assert any(name.endswith(".taps") for name in report["widths"])


def test_resnet56_curve_quick() -> None:
    points = curve.main(["--quick"])
    for run in curve.RUNS:
        assert [point.share for point in points if point.run == run] == [0.8, 0.6]
    for point in points:
        assert point.share - 0.05 <= point.flops <= point.share
        assert 0 <= point.accuracy <= 1


def test_resnet56_taught_in_bfloat16() -> None:
    """The losses that ask the original model, and a schedule of one's own."""
    report = resnet56.main(["--quick", "--quiet", "--loss", "taught", "--bf16", "--close", "0.3"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["loss"] == "taught" and report["bf16"]


def test_gates_and_batch_norm_alone_are_trained() -> None:
    gated = tgfx.transform(resnet56.quick_model(), torch.zeros(1, 3, 32, 32), granularity="connection")
    optimizer = resnet56.for_norms(gated, 0.01)
    before = {name: value.detach().clone() for name, value in gated.named_parameters()}
    batches = data.Batches(data.made(128), 32, augment=False)
    tgfx.fit(
        gated, batches, F.cross_entropy, optimizer=optimizer, budget={"flops": 0.6}, steps=8, recalibrate=2,
        progress=False,
    )  # fmt: skip
    moved = {name for name, value in gated.named_parameters() if not torch.equal(value, before[name])}
    norms = {name for name, module in gated.named_modules() if isinstance(module, nn.BatchNorm2d)}
    gates = {name for name in moved if name.startswith("gate_bank.")}
    assert gates
    assert {name.rpartition(".")[0] for name in moved - gates} == norms
    assert 0.55 <= gated.eval().ratio("flops").item() <= 0.6


def test_resnet56_quick_with_batch_norm_trained() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "norms", "--granularity", "connection", "--lr", "0.003"])
    assert report["train"] == "norms" and report["loss"] == "blur"
    assert 0.55 <= report["flops"] <= 0.6


def test_gates_stand_while_batch_norm_settles() -> None:
    ask = ["--quick", "--quiet", "--train", "norms", "--granularity", "connection", "--lr", "0.003"]
    before, after = resnet56.main(ask), resnet56.main([*ask, "--settle", "6"])
    assert after["settle"] == 6
    assert after["widths"] == before["widths"] and after["flops"] == before["flops"]
