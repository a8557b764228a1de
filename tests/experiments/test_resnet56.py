"""ResNet-56 in quick mode."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.cifar10 import data
from examples.resnet56 import curve, peer
from examples.resnet56 import run as resnet56


@pytest.mark.parametrize("train", ["joint", "gates"])
def test_resnet56_quick(train: str) -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", train])
    assert report["steps"] == 12
    assert 0.55 <= report["flops"] <= 0.6
    assert report["before"] > 0.95 and report["compact"] == report["trained"] > 0.8  # of ten classes
    assert all(width > 0 for width in report["widths"].values())


def test_what_measuring_statistics_anew_brings_is_told() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "gates", "--recalibrate", "4"])
    assert report["compact"] > 0.95 and 0.5 < report["kept"] < report["compact"]
    assert "kept" not in resnet56.main(["--quick", "--quiet", "--train", "gates"])
    model, test = resnet56.quick_model(), data.made(200, seed=1)
    gated, fresh = (tgfx.transform(copy.deepcopy(model), torch.zeros(1, 3, 32, 32)) for _ in range(2))
    gated.gates["layer3.0.conv1"].set_open_(torch.arange(64) % 2 == 0)
    cut = tgfx.shrink(gated)
    assert resnet56.with_kept_statistics(gated, fresh, test) == resnet56.accuracy(cut, test)


def test_resnet56_quick_with_gates_over_connections() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "gates", "--granularity", "connection"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["granularity"] == "connection" and report["compact"] > 0.9
    assert any(name.endswith("#2") for name in report["widths"])  # what a layer reads, beside what it makes


def test_resnet56_quick_with_gates_over_taps() -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", "gates", "--granularity", "tap"])
    assert 0.55 <= report["flops"] <= 0.6
    assert report["loss"] == "probe" and report["compact"] > 0.9
    assert any(name.endswith(".taps") for name in report["widths"])


def test_the_curve_tells_ways_to_a_share_apart(tmp_path: Path) -> None:
    """Each share goes on from the one before; the figure has the runs of other calls too."""
    task = curve.Task(
        resnet56.quick_model(), data.made(64), data.made(40, seed=1), (0.8, 0.6), 4, 32, "probe", False, 0
    )
    points = curve._all(task, tmp_path, ["channels"])
    assert curve._all(task, tmp_path, ["channels"]) == points
    with pytest.raises(SystemExit, match="way"):
        curve._all(replace(task, shares=(0.6,)), tmp_path, ["channels"])
    model = tmp_path / "channels-0.8" / "model.pt"
    state = torch.load(model, weights_only=True)
    gate = next(name for name in state if name.startswith("gate_bank."))
    torch.save({**state, gate: -state[gate]}, model)
    with pytest.raises(SystemExit, match=r"gates .* there, .* asked for"):  # 0.6 went on from other gates
        curve._all(task, tmp_path, ["channels"])
    curve._all(replace(task, shares=(0.8,)), tmp_path, ["connections"])
    drawn = (tmp_path / "curve.svg").read_text()
    assert ">channels<" in drawn and ">connections<" in drawn


def test_resnet56_curve_quick() -> None:
    points = curve.main(["--quick"])
    for run in curve.RUNS:
        assert [point.share for point in points if point.run == run] == [0.8, 0.6]
    for point in points:
        assert point.share - 0.05 <= point.flops <= point.share
        assert point.accuracy > 0.9


@pytest.mark.parametrize("loss", ["labels", "mirrored"])
def test_the_peer_cuts_to_the_same_budget(loss: str) -> None:
    pytest.importorskip("torch_pruning")
    report = peer.main(["--quick", "--loss", loss, "--budget", "0.7"])
    assert report["steps"] == 32 and report["sparse_epochs"] == 1
    assert 0.6 <= report["flops"] <= 0.7 and report["params"] < 1
    assert report["before"] > 0.95
    # mirrored, a grating of these images is one of another class: little can be learned of that
    assert report["after"] > (0.9 if loss == "labels" else 0.2)
    with pytest.raises(SystemExit, match="--data and --weights"):
        peer.main([])


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
