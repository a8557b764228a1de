"""The full modes without data, or with a folder that holds something else: a word on what belongs there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from examples.resnet56.given import whole_model

NEEDS_DATA = {
    "resnet56.run": ["--weights", "WEIGHTS"],
    "resnet56.curve": ["--weights", "WEIGHTS"],
    "resnet56.peer": ["--weights", "WEIGHTS"],
    "gradient_shapes.run": ["--weights", "WEIGHTS"],
    "vgg16.run": ["tune"],
    "style_transfer.run": [],
    "flownet.run": ["base"],
    "translation.run": [],
}


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_data_that_is_missing_is_asked_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"examples.{name}").main
    weights = tmp_path / "weights.th"
    torch.save({}, weights)
    more = [str(weights) if word == "WEIGHTS" else word for word in NEEDS_DATA[name]]
    with pytest.raises(SystemExit) as refused:
        main([*more, "--out", str(tmp_path / "out")])
    said = f"{refused.value} {capsys.readouterr().err}"
    assert "--data" in said and "--quick" in said and "README" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty"):
        main([*more, "--out", str(tmp_path / "out"), "--data", str(tmp_path / "empty")])
    assert not list((tmp_path / "out").rglob("result.json"))


@pytest.mark.parametrize("name", ["resnet56.run", "resnet56.curve", "resnet56.peer", "gradient_shapes.run"])
def test_weights_that_are_missing_are_asked_for(name: str, tmp_path: Path) -> None:
    main = importlib.import_module(f"examples.{name}").main
    with pytest.raises(SystemExit, match=r"--weights takes the state dict of a trained ResNet-56"):
        main(["--data", str(tmp_path), "--weights", str(tmp_path / "none.th"), "--out", str(tmp_path / "out")])
    (tmp_path / "other.th").write_bytes(b"no weights")
    with pytest.raises(SystemExit, match="no state dict of a ResNet-56"):
        whole_model(tmp_path / "other.th")
