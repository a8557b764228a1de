"""The command line, as a shell sees it: output, errors, exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import tgfx
from tgfx.cli.app import app
from tgfx.cli.loading import load_model, parse_inputs
from tgfx.errors import InputError, NothingToGateError
from tgfx.training.history import History
from tgfx.view.live import Live

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


def inside(*words: str) -> Result:
    """Without a process of its own."""
    return CliRunner().invoke(app, words)


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


def test_explain_says_why(model_file: Path) -> None:
    spec = f"{model_file}:small"
    done = inside("explain", spec, "0", "--input", "1x3x8x8")
    assert done.exit_code == 0 and "can be cut" in done.stdout and "tied by convolution" in done.stdout
    record = json.loads(inside("explain", spec, "2", "--input", "1x3x8x8", "--json").stdout)
    assert record["layer"] == "2"
    assert [(group["name"], group["frozen"] is None) for group in record["groups"]] == [("0", True), ("2", False)]
    assert record["groups"][0]["members"] == ["0.weight[0]", "0.bias[0]", "2.weight[1]"]
    unknown = inside("explain", spec, "nowhere", "--input", "1x3x8x8")
    assert isinstance(unknown.exception, InputError) and "nothing to explain about 'nowhere'" in str(unknown.exception)


def test_inspect_by_granularity_and_without_some_layers(model_file: Path) -> None:
    spec = f"{model_file}:small"
    done = inside("inspect", spec, "-i", "1x3x8x8", "-g", "weight", "--json")
    assert [group["size"] for group in json.loads(done.stdout)["groups"] if group["frozen"] is None] == [216, 288]
    ignored = inside("inspect", spec, "-i", "1x3x8x8", "--ignore", "0")
    assert isinstance(ignored.exception, NothingToGateError) and "is ignored, as asked" in str(ignored.exception)


def test_view_writes_a_page_or_prints_its_data(model_file: Path, tmp_path: Path) -> None:
    spec, page = f"{model_file}:small", tmp_path / "out.html"
    done = inside("view", spec, "--input", "1x3x8x8", "-o", str(page), "--no-open")
    assert done.exit_code == 0 and page.read_text().startswith("<!doctype html>"), done.output
    data = json.loads(inside("view", spec, "--input", "1x3x8x8", "--json").stdout)
    assert [node["op"] for node in data["nodes"]] == ["input", "Conv2d", "ReLU", "Conv2d", "output"]
    missing = inside("view", spec, "--input", "1x3x8x8", "-o", str(tmp_path / "no" / "folder.html"), "--no-open")
    assert isinstance(missing.exception, InputError) and "cannot be written" in str(missing.exception)


def test_view_serves_a_live_run_until_it_is_told_to_stop(tmp_path: Path) -> None:
    gated = tgfx.transform(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(1, 4))
    Live(tmp_path, gated, History(["0"]), total=1).update(1)
    command = [sys.executable, "-m", "tgfx.cli.app", "view", str(tmp_path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        with urllib.request.urlopen(found[0] + "live.json", timeout=10) as answer:
            assert json.loads(answer.read())["now"]["step"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is nothing to view" in str(inside("view", str(empty), "--no-open").exception)


def test_demo_from_training_to_the_page(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    done = inside("demo", "--steps", "40", "--json", "-o", str(page))
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["steps"] == 40 and figures["flops"][1] <= 0.4 * figures["flops"][0]
    assert figures["largest_difference"] < 1e-4 and page.exists()


def test_shell_completion_is_offered() -> None:
    done = inside("--help")
    assert "--install-completion" in done.stdout
    assert all(f" {name} " in done.stdout for name in ("inspect", "explain", "view", "demo"))
