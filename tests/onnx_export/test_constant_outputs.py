"""Outputs that are no tensors: the file gives the tensors, and the report says what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import tgfx

GIVES: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str], str]] = {
    "number": (lambda y, x: {"y": y, "n": 3}, ["y"], "n (3)"),
    "size": (lambda y, x: {"n": x.shape[2], "y": y}, ["y"], "n (8)"),
    "list": (lambda y, x: [y, 0.5, True, y.mean((2, 3))], ["output", "output_1"], "1 (0.5), 2 (True)"),
    "text": (lambda y, x: (y, {"kind": "image", "none": None}), ["output"], "1_kind ('image')"),
}


class Gives(nn.Module):
    def __init__(self, give: Callable[[Tensor, Tensor], Any], loop: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.give, self.loop = give, loop

    def forward(self, x: Tensor) -> Any:
        y = self.first(x).relu()
        for _ in range(x.ndim - 2 if self.loop else 0):  # plain fx cannot follow this
            y = y * 2
        return self.give(self.last(y), x)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("name", GIVES)
def test_gated_and_plain(name: str, loop: bool, tmp_path: Path) -> None:
    give, outputs, told = GIVES[name]
    model, x = Gives(give, loop).eval(), torch.randn(2, 3, 8, 8)
    for subject in (tgfx.transform(model, x).eval(), model):
        report = tgfx.export_onnx(subject, tmp_path / "net.onnx", x, measure=False)
        assert [value.name for value in onnx.load(tmp_path / "net.onnx").graph.output] == outputs
        assert any("leaves out" in note and told in note for note in report.notes), report.notes
