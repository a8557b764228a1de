"""ResNet-56 in quick mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tgfx
from examples.cifar10 import data
from examples.resnet56 import curve
from examples.resnet56 import run as resnet56
from examples.resnet56.losses import softened
from examples.resnet56.norms import train_norms_


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


def test_batch_norm_alone_is_trained() -> None:
    """Towards a model whose scales and shifts are others: nearer than before, and no convolution has moved."""
    model, wanted = resnet56.quick_model(), resnet56.quick_model()
    for norm in wanted.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.3, 0.3)
    images = data.made(256)
    batches = data.Batches(images, 64, augment=False)
    tgfx.recalibrate(wanted, batches)
    x, _ = next(iter(batches))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = [parameter.requires_grad for parameter in model.parameters()]

    def apart() -> float:
        with torch.no_grad():
            return float((model.eval()(x) - wanted.eval()(x)).square().mean())

    tgfx.recalibrate(model, batches)
    first = apart()
    count = train_norms_(model, batches, softened(wanted), steps=40, measure=4, lr=5e-3)
    assert apart() < 0.5 * first
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert {name.rpartition(".")[0] for name in moved} == trained
    assert count == sum(2 * module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    assert [parameter.requires_grad for parameter in model.parameters()] == asked
