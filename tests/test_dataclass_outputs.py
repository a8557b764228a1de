"""Outputs in a dataclass of the user's: given back as they are, and compared and kept like any other."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.errors import CaptureError
from tgfx.ir.source import tensors_in


@dataclass
class Detection:
    scores: Tensor
    features: list[Tensor]
    name: str = "detection"


@dataclass
class Scaled:
    """Computes something when it is made."""

    scores: Tensor
    sizes: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self.scores = self.scores * self.scores.shape[1]


class Detects(nn.Module):
    def __init__(self, kind: type, loop: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kind, self.loop = kind, loop

    def forward(self, x: Tensor) -> Any:
        for _ in range(x.ndim if self.loop else 0):
            x = x * 2
        hidden = self.second(self.first(x).relu()).relu()
        if self.kind is Detection:
            return Detection(self.third(hidden), [hidden * 2])
        return self.kind(self.third(hidden))


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_same_class_and_values(granularity: str) -> None:
    model, x = Detects(Detection).double().eval(), torch.randn(2, 4, dtype=torch.double)
    gated = tgfx.transform(model, x, granularity=granularity).eval()
    x = torch.randn(3, 4, dtype=torch.double)
    expected = model(x)
    if granularity == "channel":
        promises.gate_at_random(gated, 1.0, 0)
        assert set(gated.gates) == {"first"}  # the features are given out, so they stay
    for run in (gated, copy.deepcopy(gated), pickle.loads(pickle.dumps(gated)), tgfx.shrink(gated)):
        found = run.eval()(x)
        assert type(found) is Detection and found.name == "detection"
        for left, right in zip(tensors_in(found), tensors_in(expected), strict=True):
            promises.assert_close(left, right, promises.IDENTITY, type(run).__name__)


def test_cut_and_export(tmp_path: Path) -> None:
    gated = tgfx.transform(Detects(Detection).eval(), torch.randn(2, 4), strict=True).eval()
    promises.gate_at_random(gated, 0.4, 0)
    compact, x = tgfx.shrink(gated).eval(), torch.randn(3, 4)
    assert compact.first.out_features < 8 and compact.second.out_features == 8
    for left, right in zip(tensors_in(compact(x)), tensors_in(gated(x)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    assert list(report.outputs) == ["scores", "features_0"]


def test_where_it_cannot_be_captured_the_error_says_so() -> None:
    with pytest.raises(CaptureError, match="Detects could not be captured"):
        tgfx.transform(Detects(Detection, loop=True).eval(), torch.randn(2, 4))
    with pytest.raises(CaptureError, match="Scaled changes what it is made from"):
        tgfx.transform(Detects(Scaled).eval(), torch.randn(2, 4))
