"""The command line, as a shell sees it: output, errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.errors import InputError

MODEL = """
from torch import nn
def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
def needs(width):
    return nn.Linear(width, width)
number = 3
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_models.py"
    path.write_text(MODEL)
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tgfx.cli.app", *words], capture_output=True, text=True)


def test_inspect_prints_a_report_and_json(model_file: Path) -> None:
    done = run("inspect", f"{model_file}:small", "--input", "1x3x8x8", "--json")
    assert done.returncode == 0, done.stderr
    groups = json.loads(done.stdout)["groups"]
    assert [(group["size"], group["frozen"] is None) for group in groups] == [(8, True), (4, False)]
    assert "8/8" in run("inspect", f"{model_file}:small", "--input", "1x3x8x8").stdout


def test_an_error_is_a_message_and_an_exit_code(model_file: Path) -> None:
    done = run("inspect", f"{model_file}:smal")
    assert done.returncode == 1
    assert "there are: small" in done.stderr and "Traceback" not in done.stderr
    assert run("inspect").returncode == 2


@pytest.mark.parametrize("spec", ["nothing", "no.such.module:f", "none.py:f", "{}:number", "{}:needs", "{}:nn"])
def test_models_that_cannot_be_made(model_file: Path, spec: str) -> None:
    with pytest.raises(InputError):
        load_model(spec.format(model_file))


def test_a_checkpoint_is_loaded_and_a_bad_one_refused(model_file: Path, tmp_path: Path) -> None:
    spec = f"{model_file}:small"
    wanted = load_model(spec).state_dict()
    torch.save(wanted, tmp_path / "good.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "pickled.pt")
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "other.pt")
    loaded = load_model(spec, checkpoint=tmp_path / "good.pt").state_dict()
    assert all(torch.equal(wanted[name], loaded[name]) for name in wanted)
    for name in ("pickled.pt", "other.pt", "missing.pt"):
        with pytest.raises(InputError):
            load_model(spec, checkpoint=tmp_path / name)


def test_inputs() -> None:
    (one,) = parse_inputs(["1x3x4"])
    assert one.shape == (1, 3, 4) and one.dtype == torch.float32
    named = parse_inputs(["ids=2x16:int64", "mask=2x16:bool"])
    assert named["ids"].dtype == torch.int64 and named["mask"].dtype == torch.bool
    assert parse_inputs([]) is None
    for bad in (["3y4"], ["2x2:complex"], ["2x2", "a=2"]):
        with pytest.raises(InputError):
            parse_inputs(bad)
