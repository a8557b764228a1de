"""`tgfx export`, `tgfx verify` and `tgfx compare`, as a shell sees them."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tgfx
from tgfx.cli.app import main
from tgfx.cli.loading import load_model

MODEL = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its weights, a plan that cuts it, and both as ONNX."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "own.py").write_text(MODEL)
    torch.manual_seed(0)
    model = load_model(f"{folder / 'own.py'}:net")
    torch.save(model.state_dict(), folder / "weights.pt")
    gated = tgfx.transform(model, torch.randn(1, 3, 12, 12)).eval()
    gated.gates["0"].set_open_(torch.arange(16) < 6)
    tgfx.save_plan(gated, folder / "plan")
    return folder


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """What the `tgfx` command does, without waiting for another Python to start."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["tgfx", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def exported(folder: Path) -> Done:
    spec, shape = f"{folder / 'own.py'}:net", "1x3x12x12"
    weights = ("--checkpoint", folder / "weights.pt")
    whole = run("export", spec, "-i", shape, *weights, "-o", folder / "whole.onnx", "--no-measure")
    assert whole.returncode == 0, whole.stderr
    assert "max |ONNX Runtime - torch|" in whole.stdout
    return run("export", spec, "-i", shape, *weights, "--plan", folder / "plan", "-o", folder / "cut.onnx", "--json")


def test_export_cuts_by_a_plan_and_says_so_in_json(folder: Path, exported: Done) -> None:
    assert exported.returncode == 0, exported.stderr
    report = json.loads(exported.stdout)
    assert json.loads(report["metadata"]["tgfx.kept"])["0"] == {"kept": 6, "of": 16}
    assert report["timings"][0]["original"] > 0
    assert report["sizes"]["written"]["bytes"] == (folder / "cut.onnx").stat().st_size


def test_verify_and_its_exit_codes(folder: Path, exported: Done) -> None:
    good = run("verify", folder / "cut.onnx", "-r", "onnxruntime", "--batch", 3, "--json")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["shapes"] == {"input": [3, 3, 12, 12]}
    spec = ("--model", f"{folder / 'own.py'}:net", "--checkpoint", folder / "weights.pt")
    wrong = run("verify", folder / "cut.onnx", "-r", "onnxruntime", *spec)
    assert wrong.returncode == 1 and "differs" in wrong.stdout, "the uncut model passed for the cut one"
    (folder / "damaged.onnx").write_bytes((folder / "cut.onnx").read_bytes()[:200])
    for words in (["damaged.onnx"], ["cut.onnx", "-r", "toaster"], ["cut.onnx", "--size", "batch"]):
        done = run("verify", folder / words[0], *words[1:])
        assert done.returncode == 1 and "expected:" in done.stderr and "Traceback" not in done.stderr
    assert run("verify").returncode == 2


def test_compare(folder: Path, exported: Done) -> None:
    done = run("compare", folder / "whole.onnx", folder / "cut.onnx", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    model = load_model(f"{folder / 'own.py'}:net")
    gated = tgfx.transform(model, torch.randn(1, 3, 12, 12)).eval()
    assert figures["first"]["flops"] == gated.total("flops")
    gated.gates["0"].set_open_(torch.arange(16) < 6)
    assert figures["second"]["flops"] == gated.cost("flops").item()
    assert figures["max_delta"]["output"] > 1e-3
    assert "second / first" in run("compare", folder / "whole.onnx", folder / "cut.onnx").stdout
    assert run("compare", folder / "whole.onnx", folder / "nothing.onnx").returncode == 1


def test_a_failed_export_leaves_no_file(folder: Path) -> None:
    done = run("export", f"{folder / 'own.py'}:net", "-i", "1x4x12x12", "-o", folder / "bad.onnx")
    assert done.returncode == 1 and "does not run on the example" in done.stderr
    assert not (folder / "bad.onnx").exists()
