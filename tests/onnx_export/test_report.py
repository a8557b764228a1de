"""Figures of a report and of a comparison, against counts from elsewhere."""

import json
from pathlib import Path

import onnx
import torch
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support.export_models import FAMILIES, images, made
from tgfx.onnx_export.comparing import compare_onnx
from tgfx.onnx_export.flops import flops


def half_open(gated: tgfx.GatedModule) -> tgfx.GatedModule:
    for gate in gated.gates.values():
        gate.set_open_(torch.arange(len(gate.weight)) % 2 == 0)
    return gated.eval()


def test_original_and_cut_side_by_side(tmp_path: Path) -> None:
    model = made("resnet")
    gated = half_open(tgfx.transform(model, images(1, 3, 32, 32)))
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx")
    file = onnx.load(tmp_path / "net.onnx")
    assert (report.nodes, report.bytes) == (len(file.graph.node), (tmp_path / "net.onnx").stat().st_size)
    assert report.initializers == len(file.graph.initializer) and sum(report.ops.values()) == report.nodes
    assert report.sizes["original"].parameters > 1.8 * report.sizes["written"].parameters
    assert report.timings[0].threads == 1
    assert all(timing.original and timing.compact > 0 for timing in report.timings)
    kept = json.loads({entry.key: entry.value for entry in file.metadata_props}["tgfx.kept"])
    assert {name: (one["kept"], one["of"]) for name, one in kept.items()} == {
        name: (gate.open_count(), len(gate.weight)) for name, gate in gated.gates.items()
    }
    assert "original" in str(report) and json.dumps(report.to_dict())


def test_a_compact_model_remembers_its_cut_and_a_controller_its_budget(tmp_path: Path) -> None:
    gated = tgfx.transform(made("cnn"), FAMILIES["cnn"].example)
    gated.train().budget_loss(flops=0.5, steps=10)
    report = tgfx.export_onnx(half_open(gated), tmp_path / "net.onnx", measure=False)
    assert json.loads(report.metadata["tgfx.budget"]) == {"flops": 0.5}
    again = tgfx.export_onnx(tgfx.shrink(gated), tmp_path / "net.onnx", FAMILIES["cnn"].example, measure=False)
    assert again.metadata["tgfx.kept"] == report.metadata["tgfx.kept"]


def test_flops_are_torchs_own(tmp_path: Path) -> None:
    for name in ("cnn", "flownet"):
        model, example = made(name), FAMILIES[name].example
        tgfx.export_onnx(model, tmp_path / "net.onnx", example, measure=False)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*(example if isinstance(example, tuple) else (example,)))
        assert flops(onnx.load(tmp_path / "net.onnx")) == counter.get_total_flops(), name


def test_two_files_side_by_side(tmp_path: Path) -> None:
    gated = half_open(tgfx.transform(made("resnet"), images(1, 3, 32, 32)))
    tgfx.export_onnx(made("resnet"), tmp_path / "a.onnx", images(1, 3, 32, 32), measure=False)
    tgfx.export_onnx(gated, tmp_path / "b.onnx", measure=False)
    same = compare_onnx(tmp_path / "a.onnx", tmp_path / "a.onnx")
    assert same.max_delta == {"output": 0.0}
    other = compare_onnx(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert other.second.flops == gated.cost("flops").item() and other.first.flops == gated.total("flops")
    assert other.max_delta["output"] > 1e-3 and "FLOPs per sample" in str(other)
    tgfx.export_onnx(made("flownet"), tmp_path / "c.onnx", FAMILIES["flownet"].example, measure=False)
    assert "not run together" in compare_onnx(tmp_path / "a.onnx", tmp_path / "c.onnx").note
