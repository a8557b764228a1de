"""Ctrl-C in a full run leaves a checkpoint and no result."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from examples.cifar10 import data
from examples.gradient_shapes import run as gradient_shapes


def test_an_interrupted_run_writes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = gradient_shapes._quick_task()
    whole = data.Batches.__iter__

    def interrupted(self: data.Batches):  # type: ignore[no-untyped-def]
        for index, batch in enumerate(whole(self)):
            if index == 3 and self.augment:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.setattr(data.Batches, "__iter__", interrupted)
    with pytest.raises(SystemExit, match="start it again"):
        gradient_shapes.curve(task, "constant", 0, tmp_path)
    assert (tmp_path / "constant-0.pt").is_file() and not (tmp_path / "constant-0.json").exists()
