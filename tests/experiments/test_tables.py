"""The commands that lay the results of a folder out beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tgfx
from examples.flownet import compare
from examples.flownet import run as flownet
from examples.translation import table


def write(folder: Path, name: str, result: dict[str, Any]) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "result.json").write_text(json.dumps(result))
    return folder / name


def test_flow_nets_are_compared_with_the_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, errors, size in (("base", [9.0, 9.0], 3), ("whole", [5.0, 4.0], 2), ("channels-0.45", [5.5, 4.1], 1)):
        epe = {"chairs": errors, "held_out": errors}
        means = {kind: sum(own) / 2 for kind, own in epe.items()}
        own = {"epe": means, "epe_of_pairs": epe, "flops": size / 2, "params": size / 2}
        folder = write(tmp_path, name, {**own, "safetensors_bytes": 10**6 * size, "onnx_bytes": 10**6 * size})
        tgfx.export_onnx(nn.Conv2d(6, 2, 3).eval(), folder / "model.onnx", torch.randn(1, 6, 16, 16), measure=False)
    report = compare.main([str(tmp_path), "--turns", "3"])
    assert list(report) == ["whole", "channels-0.45"]
    mean, deviation = report["channels-0.45"]["epe_more"]["chairs"]
    assert mean == pytest.approx(0.3) and deviation == pytest.approx(0.2)  # of 0.5 and 0.1
    assert report["whole"]["faster"] == 1 and report["whole"]["epe_more"]["chairs"] == [0, 0]
    assert "| channels-0.45 | 4.800 | +0.300 ± 0.200 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "compare.json").read_text()) == report
    with pytest.raises(SystemExit, match="is no folder"):
        compare.main([str(tmp_path / "none")])


def test_translations_stand_below_the_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"params": 0.9, "flops": 0.8, "wall": 12}
    for name, bleu, heads in (("heads-0.39", 31.5, 0.39), ("whole", 32.0, 1.0)):
        kept = {"En": 1, "De": 2, "En-De": 3}
        scores = {table.SCORE: bleu, "bleu_val": bleu + 1}
        write(tmp_path, name, {**scores, **shares, "kept": kept, "heads": heads})
    rate = {"decoding": 200.0, "decoding_ratio": 1.5, "forward": 900.0, "forward_ratio": 1.25}
    write(tmp_path, "speed", {"pieces_per_second": {"heads-0.39": rate}})
    table.main(tmp_path)
    _, _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| whole | 1/2/3 | 1.0000 | 32.00 | 33.00 |  |")
    assert "| 31.50 | 32.50 | -0.50, -0.50 |" in second and "200/s, × 1.50 | 900/s, × 1.25 | 12 |" in second


def test_flow_stages_are_asked_for_in_order(tmp_path: Path) -> None:
    ask = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="run the stage `base`"):
        flownet.main(["further", *ask])
    with pytest.raises(SystemExit, match="budgets are for the stage `further`"):
        flownet.main(["base", *ask, "--channels", "0.5"])
