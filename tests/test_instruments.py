"""TGFX_DUMP: a numbered file after every pass, and nothing without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tgfx
from tests.support.view_models import EXAMPLE, Residual
from tgfx.errors import InputError

TRANSFORM = ["capture", "channels", "couple", "place", "insert_gates", "cost"]
SHRINK = ["survivors", "dead_branches", "cut"]


def numbered(names: list[str], first: int = 10) -> list[str]:
    return [f"{number:03}_{name}.dot" for number, name in zip(range(first, 1000, 10), names, strict=False)]


def test_a_file_after_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGFX_DUMP", str(tmp_path / "dump"))
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE))
    gated.gates["stem"].set_open_(torch.arange(8) < 5)
    tgfx.shrink(gated)
    files = {path.name: path.read_text() for path in sorted((tmp_path / "dump").iterdir())}
    assert list(files) == numbered(TRANSFORM + SHRINK)
    assert "stem (8): tied by add" in files["030_couple.dot"]
    assert "gate_bank" in files["050_insert_gates.dot"] and "gate_bank" not in files["010_capture.dot"]
    assert "[1, 8, 6, 6] -> [1, 5, 6, 6]" in files["070_survivors.dot"]
    for name, text in files.items():
        assert text.startswith("digraph ") and text.count("->") >= len(gated.facts.source.module.graph.nodes) - 2, name


def test_a_second_run_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGFX_DUMP", str(tmp_path))
    (tmp_path / "notes.txt").write_text("not a dump")
    for _ in range(2):
        tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))
    names = sorted(path.name for path in tmp_path.glob("*.dot"))
    assert names == numbered(TRANSFORM) + numbered(TRANSFORM, 70)


def test_weights_and_compaction_are_dumped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))
    gated.gates["stem"].set_open_(torch.arange(8) < 5)
    monkeypatch.setenv("TGFX_DUMP", str(tmp_path))
    tgfx.compact_(gated, optimizer, patience=0)
    tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE), granularity="weight")
    expected = ["cut", "carry", "insert_gates", "capture", "weight_uses", "insert_weight_gates"]
    assert sorted(path.name for path in tmp_path.iterdir()) == numbered(expected)


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TGFX_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TGFX_DUMP", str(tmp_path / "file"))
    with pytest.raises(InputError, match="TGFX_DUMP"):
        tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))
