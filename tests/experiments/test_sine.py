"""Which sine nodes are kept, in quick mode."""

from __future__ import annotations

from pathlib import Path

from examples.sine import run as sine


def test_sine_quick(tmp_path: Path) -> None:
    found = sine.main(["--quick", "--out", str(tmp_path)])
    gates = [one for one in found if one.method == "gates"]
    softmax = [one for one in found if one.method == "softmax"]
    assert all(one.used == 1 for one in gates)
    assert all(one.used > 1 for one in softmax)
    assert sum(one.error < 1e-3 for one in gates) >= 2
    assert "<svg" in (tmp_path / "sine.svg").read_text()
