"""fp16 and int8 variants of a cut model: smaller, close, and never unusable without a word."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tgfx
from tests.support.export_models import FAMILIES, made
from tests.support.head_promises import close_some
from tgfx.errors import ExportError, InputError, VerificationError


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cut residual net, wide enough for weights to be most of the file."""
    path = tmp_path_factory.mktemp("variants") / "net.onnx"
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
    ).eval()  # fmt: skip
    gated = tgfx.transform(model, FAMILIES["resnet"].example).eval()
    close_some(gated)
    tgfx.export_onnx(gated, path, measure=False)
    return path


def loader(rows: int = 24) -> DataLoader:
    dice = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(rows, 3, 12, 12, generator=dice), torch.zeros(rows)), batch_size=8)


def test_int8_is_smaller_and_close(compact: Path, tmp_path: Path) -> None:
    report = tgfx.quantize_onnx(compact, tmp_path / "int8.onnx", loader(), evaluation=loader(16), measure=False)
    near = report.outputs["output"]
    assert report.samples == 16 and 0 < near.mean_delta < near.max_delta < 0.05 and near.top1 == 1.0
    assert report.bytes_after < 0.45 * report.bytes_before
    ops = {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= ops
    entries = {entry.key: entry.value for entry in onnx.load(tmp_path / "int8.onnx").metadata_props}
    assert entries["tgfx.variant"] == "int8" and "tgfx.kept" in entries
    assert "top-1 agreement" in str(report) and report.to_dict()["kind"] == "int8, static QDQ"


def test_fp16_is_half_and_close(compact: Path, tmp_path: Path) -> None:
    report = tgfx.fp16_onnx(compact, tmp_path / "half.onnx", loader())
    assert report.outputs["output"].max_delta < 2e-3 and report.outputs["output"].top1 == 1.0
    assert report.bytes_after < 0.6 * report.bytes_before
    assert report.timings and report.timings[0].original is not None
    quick = tgfx.fp16_onnx(compact, tmp_path / "half.onnx", keep_io_types=False, measure=False)
    assert "random numbers" in " ".join(quick.notes)
    kinds = [value.type.tensor_type.elem_type for value in onnx.load(tmp_path / "half.onnx").graph.input]
    assert kinds == [onnx.TensorProto.FLOAT16]


def test_calibration_by_name_and_bad_loaders(compact: Path, tmp_path: Path) -> None:
    named = [{"input": torch.randn(4, 3, 12, 12), "label": torch.zeros(4)}]
    assert tgfx.quantize_onnx(compact, tmp_path / "a.onnx", named, measure=False).samples == 4
    for bad in ([], [{"x": torch.randn(4, 3, 12, 12)}], [()], [("picture",)]):
        with pytest.raises(InputError):
            tgfx.quantize_onnx(compact, tmp_path / "b.onnx", bad, measure=False)
    assert not (tmp_path / "b.onnx").exists()


def test_batches_are_taken_apart_where_the_file_wants_single_images(tmp_path: Path) -> None:
    tgfx.export_onnx(made("resnet"), tmp_path / "one.onnx", FAMILIES["resnet"].example, profile="nnapi", measure=False)
    assert tgfx.quantize_onnx(tmp_path / "one.onnx", tmp_path / "8.onnx", loader(16), measure=False).samples == 16


def test_numbers_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 40000.0) * 3.0

    tgfx.export_onnx(Large().eval(), tmp_path / "net.onnx", torch.ones(1, 2), measure=False)
    with pytest.raises(VerificationError, match="float16 cannot hold") as caught:
        tgfx.fp16_onnx(tmp_path / "net.onnx", tmp_path / "half.onnx", [torch.ones(2, 2)], measure=False)
    assert "120,000" in str(caught.value) and "Mul" in str(caught.value)
    assert not (tmp_path / "half.onnx").exists()


def test_a_masks_lowest_number_is_not_one_too_large(tmp_path: Path) -> None:
    """Hugging Face's masks add the lowest float32; in float16 that is the lowest float16, and the softmax the same."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
            return torch.softmax(x + mask, -1)

    example = (torch.randn(2, 6), torch.tensor([[True] * 4 + [False] * 2] * 2))
    tgfx.export_onnx(Masked().eval(), tmp_path / "net.onnx", example, measure=False)
    report = tgfx.fp16_onnx(tmp_path / "net.onnx", tmp_path / "half.onnx", [example], measure=False)
    assert report.outputs["output"].max_delta < 1e-3


def test_transposed_convolutions_with_groups_stay_float32(tmp_path: Path) -> None:
    """onnxruntime 1.31 fails on them with scales per channel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 4, 2, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1))
    tgfx.export_onnx(model.eval(), tmp_path / "net.onnx", torch.randn(1, 3, 12, 12), measure=False)
    report = tgfx.quantize_onnx(tmp_path / "net.onnx", tmp_path / "int8.onnx", loader(), measure=False)
    assert "stay float32" in " ".join(report.notes) and report.outputs["output"].max_delta < 0.05
    whole = tgfx.quantize_onnx(
        tmp_path / "net.onnx", tmp_path / "int8.onnx", loader(), per_channel=False, measure=False
    )
    assert "stay float32" not in " ".join(whole.notes) and whole.bytes_after < report.bytes_after


def test_batches_that_do_not_fit_are_refused(compact: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="quantizer does not take"):
        tgfx.quantize_onnx(compact, tmp_path / "int8.onnx", [torch.randn(2, 5, 12, 12)], measure=False)
    assert list(tmp_path.iterdir()) == []
