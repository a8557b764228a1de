"""Which sine nodes are kept, in quick mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.sine import run as sine


def test_sine_quick(tmp_path: Path) -> None:
    found = sine.main(["--quick", "--out", str(tmp_path)])
    gates = [one for one in found if one.method == "gates"]
    softmax = [one for one in found if one.method == "softmax"]
    assert all(one.used == 1 for one in gates)
    assert all(one.used > 1 for one in softmax)
    assert sum(one.error < 1e-3 for one in gates) >= 2
    assert "<svg" in (tmp_path / "sine.svg").read_text()


def test_a_seed_that_is_done_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sine.both(0, 20, None, tmp_path)
    monkeypatch.setattr(sine, "softmax", None)
    assert sine.both(0, 20, None, tmp_path) == first
    with pytest.raises(SystemExit, match="steps 20 there, 21 asked for"):
        sine.both(0, 21, None, tmp_path)
