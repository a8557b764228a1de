"""Measuring latency: which layers are timed, the cache, and what goes wrong."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.latency_models import calls
from tgfx.errors import InputError, MissingPackageError
from tgfx.latency import measuring, whole
from tgfx.latency.cache import Cache, folder_for
from tgfx.latency.needs import needs

TINY = {"turns": 1, "whole": False}


# -- measuring -----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """One of each kind that is timed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.grouped = nn.Conv2d(12, 16, 3, groups=2, dilation=1)
        self.up = nn.ConvTranspose2d(16, 9, 4, stride=2, padding=1, output_padding=1)
        self.last = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.first(x))))
        return self.last(torch.relu(self.up(torch.relu(self.grouped(x)))).mean((2, 3)))


@pytest.fixture
def layers() -> tgfx.GatedModule:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    return tgfx.transform(Layers(), torch.randn(1, 3, 12, 12)).eval()


def test_a_real_measurement(layers: tgfx.GatedModule, tmp_path: Path) -> None:
    table = tgfx.latency.measure(layers, cache=tmp_path, turns=2)
    assert {need.shape for need in needs(layers)} == set(table.points)
    assert {shape.op for shape in table.points} == {"conv", "conv_transpose", "linear"}
    assert all(time > 0 for times in table.points.values() for time in times.values())
    assert table.whole is not None and table.whole > 0 and table.scale > 0
    assert table.about["runtime"] == "onnxruntime" and table.about["threads"] == "1"
    layers.use_latency(table)
    assert layers.total("latency") >= table.whole * (1 - 1e-9)
    assert tgfx.finish(layers, latency=1.0).ratio("latency") <= 1.0


def test_layer_models_compute_what_the_layer_would(layers: tgfx.GatedModule) -> None:
    """The ONNX file of each layer takes and gives the sizes of the cut layer."""
    import onnxruntime

    from tgfx.latency.onnx_layer import bare_model, layer_model

    compact = tgfx.shrink(layers)
    sizes: dict[str, tuple] = {}
    for call in calls(layers):
        module = compact.get_submodule(call.node)
        module.register_forward_hook(
            lambda m, args, out, node=call.node: sizes.update({node: (tuple(args[0].shape), tuple(out.shape))})
        )
    compact(torch.randn(1, 3, 12, 12))
    for call in calls(layers):
        taken, given = sizes[call.node]
        model = bare_model(call.shape, taken[1], given[1])
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        (out,) = session.run(None, {"x": np.zeros(taken, dtype=np.float32)})
        assert out.shape == given
        onnxruntime.InferenceSession(layer_model(call.shape, taken[1], given[1]), providers=["CPUExecutionProvider"])


def test_template_with_models(layers: tgfx.GatedModule, tmp_path: Path) -> None:
    path = tgfx.latency.template(layers, tmp_path / "device.csv", models=tmp_path / "models")
    lines = path.read_text().splitlines()
    names = {line.split(",")[-1] for line in lines[1:-1]}
    assert names == {file.name for file in (tmp_path / "models").iterdir()} and len(names) == len(lines) - 2


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No clock: every model takes 1 ms; what was timed is counted."""
    seen: list[int] = []

    def times(clock, models, turns) -> np.ndarray:
        seen.append(len(models))
        return np.ones(len(models)) + np.arange(len(models))[::-1]

    monkeypatch.setattr(measuring.Clock, "times", times)
    return seen


def test_the_cache_is_used(layers: tgfx.GatedModule, tmp_path: Path, timed: list[int]) -> None:
    first = tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    assert timed
    timed.clear()
    assert tgfx.latency.measure(layers, cache=tmp_path, **TINY).points == first.points and not timed
    tgfx.latency.measure(layers, cache=tmp_path, threads=2, **TINY)
    assert timed and len(list(tmp_path.iterdir())) == 2  # another number of threads is another table
    timed.clear()
    tgfx.latency.measure(layers, cache=False, **TINY)
    assert timed and len(list(tmp_path.iterdir())) == 2


DAMAGE = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no times": lambda text: json.dumps({**json.loads(text), "ms": 3}),
    "negative": lambda text: text.replace(": 1.0", ": -1.0", 1) if ": 1.0" in text else text.replace(": ", ": -", 9),
    "other machine": lambda text: text.replace("onnxruntime", "abacus"),
    "other format": lambda text: json.dumps({**json.loads(text), "format": 0}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_measured_anew(layers, tmp_path: Path, timed: list[int], kind: str) -> None:
    first = tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    (path,) = tmp_path.iterdir()
    path.write_text(DAMAGE[kind](path.read_text()))
    timed.clear()
    with pytest.warns(UserWarning, match="measured anew"):
        assert tgfx.latency.measure(layers, cache=tmp_path, **TINY).points == first.points
    assert timed and [file.name for file in tmp_path.iterdir()] == [path.name]
    timed.clear()
    tgfx.latency.measure(layers, cache=tmp_path, **TINY)
    assert not timed


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    one, two = Cache(tmp_path, {"a": "b"}), Cache(tmp_path, {"a": "b"})
    one.times["x"], two.times["y"] = 1.0, 2.0
    one.save()
    two.save()
    assert Cache(tmp_path, {"a": "b"}).times == {"x": 1.0, "y": 2.0}


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TGFX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder_for(None) == tmp_path / "xdg" / "tgfx"
    monkeypatch.setenv("TGFX_CACHE", str(tmp_path / "own"))
    assert folder_for(None) == tmp_path / "own" and folder_for(tmp_path) == tmp_path
    monkeypatch.delenv("TGFX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_for(None) == Path.home() / ".cache" / "tgfx"


def test_a_model_that_cannot_be_exported(layers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(whole, "_exported", refuse)
    with pytest.warns(UserWarning, match="no such operator"):
        table = tgfx.latency.measure(layers, cache=False, turns=1)
    assert table.whole is None and "latency" not in layers.kinds


def test_bad_arguments(layers: tgfx.GatedModule, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"runtime": "abacus"}, {"threads": 0}, {"turns": True}):
        with pytest.raises(InputError):
            tgfx.latency.measure(layers, cache=False, **options)
    with pytest.raises(InputError, match="only a gated model"):
        tgfx.latency.measure(nn.Linear(2, 2))  # type: ignore[arg-type]
    double = tgfx.transform(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double(), torch.zeros(1, 4).double())
    with pytest.raises(InputError, match="float32"):
        tgfx.latency.measure(double, cache=False)
    for package in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingPackageError, match=package):
            tgfx.latency.measure(layers, cache=False)
        monkeypatch.undo()
