"""Profiles: shapes, operators and formats that runtimes on phones want."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
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
    with pytest.raises(ExportError, match="ncnn does not take nodes") as caught:
        tgfx.export_onnx(gated, tmp_path / "net.onnx", profile="ncnn", simplify=False, measure=False)
    found = str(caught.value.found)
    assert found.startswith("Gather") and "export_models.py" in found and "several channels" in found


class Phone(nn.Module):
    """What MobileNetV3 is made of, and an uneven split."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(5, 8, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.hardswish(self.a(x)).split((5, 3), 1)
        return F.hardsigmoid(self.b(left)) * F.avg_pool2d(self.c(right), 1)


@pytest.mark.parametrize(
    ("profile", "gone"), [("nnapi", {"HardSwish", "HardSigmoid", "Split"}), ("coreml", {"HardSwish"})]
)
def test_what_a_runtime_lacks_is_written_with_what_it_has(profile: str, gone: set[str], tmp_path: Path) -> None:
    plain = tgfx.export_onnx(Phone().eval(), tmp_path / "net.onnx", EXAMPLE, measure=False)
    assert {"HardSwish", "HardSigmoid", "Split"} <= set(plain.ops)
    report = tgfx.export_onnx(Phone().eval(), tmp_path / "net.onnx", EXAMPLE, profile=profile, measure=False)
    assert not gone & set(report.ops) and set(report.ops) <= OPERATORS[profile] and report.max_delta["output"] < 1e-6
    said = [note for note in report.notes if "written with operators" in note]
    assert {note.split()[0] for note in said} == gone
    assert f"{report.nodes} of {report.nodes} nodes in 1 part(s)" in " ".join(report.notes), "ONNX Runtime's own tool"


class Settings(nn.Module):
    """Operators that NNAPI knows, set as it does not take them: one a line."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.image = nn.Conv1d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x.flatten(2))  # a 1-d convolution
        y = F.softmax(y, 1)  # of three axes
        y = y.unflatten(2, (2, -1))
        y = F.pad(self.image(y), (1, 1, 0, 0), mode="reflect")  # reflected
        y = F.max_pool2d(y, 2, ceil_mode=True)  # the last half window counts
        y = F.avg_pool2d(y, 3, 1, 1)  # with its padding
        y = F.interpolate(y, scale_factor=2.0, mode="bicubic")  # cubic
        return F.pixel_shuffle(y, 2)  # channels first


def test_settings_that_nnapi_does_not_take_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="nnapi does not take nodes of the model as they are set") as caught:
        tgfx.export_onnx(Settings().eval(), tmp_path / "net.onnx", EXAMPLE, profile="nnapi", measure=False)
    found = str(caught.value.found)
    lines = Path(__file__).read_text().splitlines()
    first = next(number for number, text in enumerate(lines, 1) if "# a 1-d convolution" in text)
    for place, reason in enumerate(
        (
            "only 2-d is taken",
            "only 2 and 4",
            None,
            "mode reflect",
            "ceil_mode",
            "count_include_pad",
            "mode cubic",
            "CRD",
        )
    ):
        where = f"{Path(__file__).name}:{first + place}"
        assert reason is None or any(where in line and reason in line for line in found.splitlines()), (where, found)
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_and_many_axes_are_refused_for_nnapi(tmp_path: Path) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rows(ids).reshape(2, 1, 2, 1, 4) * 2.0

    with pytest.raises(ExportError, match="nnapi") as caught:
        tgfx.export_onnx(
            Looked().eval(), tmp_path / "net.onnx", torch.tensor([[1, 2], [3, 4]]), profile="nnapi", measure=False
        )
    assert "int64" in str(caught.value.found) and "5 axes" in str(caught.value.found)


def test_ncnn_takes_one_sample_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no batch dimension"):
        tgfx.export_onnx(
            made("resnet"), tmp_path / "net.onnx", torch.randn(2, 3, 12, 12), profile="ncnn", measure=False
        )


def test_every_list_has_a_source_and_the_everyday_operators() -> None:
    assert set(OPERATORS) == set(SOURCES)
    for name, known in OPERATORS.items():
        assert {"Conv", "Gemm", "Relu", "Add", "Concat", "Reshape", "MaxPool"} <= known, name
