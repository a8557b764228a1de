"""Style transfer in quick mode, its net and its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tgfx
from examples.style_transfer import data as style_data
from examples.style_transfer import features as style_features
from examples.style_transfer import run as style_transfer
from examples.style_transfer.model import StyleNet
from examples.style_transfer.training import gates_of


def test_style_transfer_quick(tmp_path: Path) -> None:
    out = style_transfer.main(["--quick", "--quiet", "--out", str(tmp_path)])
    table, results = out["table"], out["results"]
    whole = table["original"]
    for share in (0.4, 0.1):
        name = f"channels_{share:g}"
        own, result = table[name], results[name]
        assert share - 0.01 <= own["channels"] <= share
        assert result["gated - compact"] < 1e-5 and result["torch - onnx"] < 1e-4
        # the file of so small a net has much besides its weights
        assert own["onnx bytes"] < 1.2 * share * whole["onnx bytes"] and own["params"] < share**1.4 * whole["params"]
        assert all(gate["open"] > 0 for gate in result["gates"])
    first = json.loads((tmp_path / "first" / "result.json").read_text())
    untrained = first["before"]["loss"]
    assert first["test"]["loss"] < 0.9 * untrained
    assert whole["loss"] < first["test"]["loss"]
    assert all(own["loss"] < 0.9 * untrained for own in table.values())
    assert "conv3, res1-2, res2-2" in (tmp_path / "channels.svg").read_text()
    assert (tmp_path / "stylised.jpg").stat().st_size > 1000
    stamp = (tmp_path / "original" / "model.onnx").stat().st_mtime_ns  # a second run finds everything done
    style_transfer.main(["--quick", "--quiet", "--out", str(tmp_path)])
    assert (tmp_path / "original" / "model.onnx").stat().st_mtime_ns == stamp


def test_style_transfer_by_the_rule_of_the_paper(tmp_path: Path) -> None:
    """Equation 7 moves the gates, and the net is cut where they end."""
    ask = ["--quick", "--quiet", "--out", str(tmp_path), "--shares", "0.1", "--weight", "100"]
    for name in ("first", "lambda_0.1"):
        assert style_transfer.main([*ask, "--only", name]) == {}
    result = json.loads((tmp_path / "lambda_0.1" / "result.json").read_text())
    opened = {name: gate["open"] for gate in result["gates"] for name in gate["layers"]}
    assert result["lambda"] == 100 and result["channels"] < 0.99
    assert result["params"] == load_weights(tmp_path / "lambda_0.1")
    assert result["gated - compact"] < 1e-5 and min(opened.values()) > 0
    with pytest.raises(SystemExit, match=r"lambda 100\.0 there, 50\.0 asked for"):
        style_transfer.main([*ask[:-1], "50", "--only", "lambda_0.1"])


def load_weights(folder: Path) -> int:
    return sum(value.numel() for value in load_file(folder / "model.safetensors").values())


def test_style_net_is_gated_but_for_its_output_and_cut_exactly() -> None:
    torch.manual_seed(0)
    net = StyleNet(styles=3, width=8, blocks=3).eval()
    for name, parameter in net.named_parameters():
        if "scale" in name or "shift" in name:
            torch.nn.init.normal_(parameter, mean=0.5)
    images, style = torch.rand(3, 3, 32, 40), torch.tensor([2, 0, 1])
    gated = tgfx.transform(net, (images[:1], style[:1])).eval()
    assert torch.equal(gated(images, style), net(images, style))
    trunk = ["conv3", *(f"residuals.{block}.conv2" for block in range(3))]
    alone = ["conv1", "conv2", *(f"residuals.{block}.conv1" for block in range(3)), "up1", "up2"]
    assert sorted(gate["layers"] for gate in gates_of(gated)) == sorted([trunk, *([name] for name in alone)])
    for gate in gated.gates.values():
        gate.set_open_(torch.rand(gate.weight.shape) < 0.4)
    compact = tgfx.shrink(gated)
    kept = gated.gates["conv3.conv"].open_count()
    assert compact.get_submodule("residuals.2.conv2.norm.scale").weight.shape == (3, kept)
    assert sum(p.numel() for p in compact.parameters()) == int(gated.cost("params"))
    torch.testing.assert_close(compact(images, style), gated(images, style), rtol=0, atol=1e-5)


def test_crops_and_features_of_style_transfer(tmp_path: Path) -> None:
    pictures = style_data.made()
    loader = style_data.Crops(pictures.train, 2, side=24, batch=4, seed=1)
    images, style = next(iter(loader))
    assert images.shape == (4, 3, 24, 24) and images.min() >= 0 and images.max() <= 1
    assert len(loader) == 6 and set(style.tolist()) <= {0, 1}
    assert torch.equal(images, next(iter(style_data.Crops(pictures.train, 2, side=24, batch=4, seed=1)))[0])
    net = style_features.random_features()
    assert [tuple(x.shape[1:]) for x in net(images)] == [(16, 24, 24), (32, 12, 12), (48, 6, 6), (64, 3, 3)]
    with pytest.raises(FileNotFoundError, match="paintings"):
        style_data.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"vgg16-397923af\.pth"):
        style_features.vgg16(tmp_path)
    with pytest.raises(SystemExit, match="--data"):
        style_transfer.main([])
