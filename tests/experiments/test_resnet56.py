"""ResNet-56 in quick mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tgfx
from examples.benchmarks.resnet56 import BasicBlock
from examples.cifar10 import data
from examples.resnet56 import curve
from examples.resnet56 import run as resnet56
from examples.resnet56.losses import softened
from examples.resnet56.norms import train_norms_
from examples.resnet56.shifts import shift_names, with_shifts_on_shortcuts


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


def _with_shifts() -> nn.Module:
    """Shifts of a new net are 0, and none would be missed."""
    model = resnet56.quick_model().eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.bias, 0.5, 1.0)
    return model


def test_shifts_on_shortcuts_change_nothing() -> None:
    model = _with_shifts()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = model(x), with_shifts_on_shortcuts(model).eval()(x)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_what_a_branch_adds_at_rest_stays_when_its_gates_close() -> None:
    """All that the branches add is closed: of each the shift is left, in the gated and in the cut model."""
    model = _with_shifts()
    gated = tgfx.transform(with_shifts_on_shortcuts(model), torch.zeros(1, 3, 32, 32), granularity="connection").eval()
    for group in gated.groups:
        if any(str(member).endswith("bn2.weight[0]") for member in group.members):
            gated.gates[group.name].set_open_(torch.zeros(group.size, dtype=torch.bool))
    with torch.no_grad():
        for block in (block for block in model.modules() if isinstance(block, BasicBlock)):
            block.bn2.weight.zero_()
        x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        wanted = model(x)
        for found in (gated(x), tgfx.shrink(gated).eval()(x)):
            assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_shifts_on_shortcuts_are_trained_with_batch_norm() -> None:
    model = with_shifts_on_shortcuts(_with_shifts())
    gated = tgfx.transform(model, torch.zeros(1, 3, 32, 32), granularity="connection")
    names = shift_names(model)
    before = {name: gated.get_parameter(name).clone() for name in names}
    assert len(names) == 3
    batches = data.Batches(data.made(64), 32, augment=False)
    train_norms_(gated, batches, softened(resnet56.quick_model()), steps=2, measure=2, also=names)
    assert not any(torch.equal(gated.get_parameter(name), before[name]) for name in names)


def test_gates_that_are_to_be_taken_must_be_there(tmp_path: Path) -> None:
    task = curve.Task(resnet56.quick_model(), data.made(64), data.made(64), (0.8,), 2, 2, 32, "blur", False, 0)
    with pytest.raises(FileNotFoundError, match="the run whose gates are taken comes first"):
        curve.go_down(task, "connections, scale and shift trained", tmp_path)


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
