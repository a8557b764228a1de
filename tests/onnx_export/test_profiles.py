"""Profiles: shapes, operators and formats that runtimes on phones want."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.export_models import FAMILIES, made
from tgfx.errors import ExportError, InputError
from tgfx.onnx_export.profile_ops import OPERATORS, SOURCES
from tgfx.onnx_export.profiles import PROFILES

EXAMPLE = FAMILIES["resnet"].example


@pytest.mark.parametrize("profile", PROFILES)
def test_a_convolutional_net_fits_every_profile(profile: str, tmp_path: Path) -> None:
    report = tgfx.export_onnx(made("resnet"), tmp_path / "net.onnx", EXAMPLE, profile=profile, measure=False)
    fixed = report.inputs["input"] == (1, 3, 12, 12)
    assert fixed == PROFILES[profile].static and report.metadata["tgfx.profile"] == profile
    assert any("wants fixed ones" in note for note in report.notes) == fixed
    assert (report.ort_path is not None) == (profile == "ort-mobile")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"net.onnx"} | ({"net.ort"} if profile == "ort-mobile" else set())


def test_the_ort_file_runs(tmp_path: Path) -> None:
    model = made("resnet")
    report = tgfx.export_onnx(model, tmp_path / "net.onnx", EXAMPLE, profile="ort-mobile", measure=False)
    x = torch.randn(3, 3, 12, 12)
    (found,) = onnxruntime.InferenceSession(report.ort_path).run(None, {"input": x.numpy()})
    assert np.abs(found - model(x).detach().numpy()).max() < 1e-5


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.cumsum(y, 1)  # nobody's accelerator does this


@pytest.mark.parametrize("profile", ["nnapi", "coreml", "ncnn"])
def test_operators_that_a_runtime_lacks_are_listed_with_their_lines(profile: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{profile} lacks operators") as caught:
        tgfx.export_onnx(Sorted().eval(), tmp_path / "net.onnx", EXAMPLE, profile=profile, measure=False)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# nobody's accelerator" in text)
    assert "CumSum" in str(caught.value.found) and f"{Path(__file__).name}:{line}" in str(caught.value.found)
    assert SOURCES[profile] in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_look_up_is_refused_for_ncnn(tmp_path: Path) -> None:
    """pnnx would take the first index for all: tests/runtimes sees it."""
    gated = tgfx.transform(made("shuffle"), FAMILIES["shuffle"].example).eval()
    gated.gates["a"].set_open_(torch.arange(12) != 3)
    tgfx.export_onnx(gated, tmp_path / "net.onnx", profile="ncnn", measure=False)  # gone into the weights
    with pytest.raises(ExportError, match="ncnn lacks operators") as caught:
        tgfx.export_onnx(gated, tmp_path / "net.onnx", profile="ncnn", simplify=False, measure=False)
    assert str(caught.value.found).startswith("Gather") and "export_models.py" in str(caught.value.found)


def test_ncnn_takes_one_sample_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no batch dimension"):
        tgfx.export_onnx(
            made("resnet"), tmp_path / "net.onnx", torch.randn(2, 3, 12, 12), profile="ncnn", measure=False
        )


def test_every_list_has_a_source_and_the_everyday_operators() -> None:
    assert set(OPERATORS) == set(SOURCES)
    for name, known in OPERATORS.items():
        assert {"Conv", "Gemm", "Relu", "Add", "Concat", "Reshape", "MaxPool"} <= known, name
