"""Exported files in the runtimes themselves. Those that are not installed are skipped, by name."""

import copy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import tgfx
from tests.support.export_models import FAMILIES, made
from tests.support.head_promises import close_some
from tgfx.errors import InputError, MissingPackageError, OnnxFileError
from tgfx.runtimes import verify
from tgfx.runtimes.results import RuntimeResult
from tgfx.runtimes.verify import missing_packages, verify_onnx


@cache
def exported(name: str) -> tuple[bytes, nn.Module]:
    family = FAMILIES[name]
    gated = tgfx.transform(made(name), family.example, granularity=family.granularity).eval()
    close_some(gated)
    compact = tgfx.shrink(gated)
    with tempfile.TemporaryDirectory() as folder:
        tgfx.export_onnx(compact, Path(folder) / "net.onnx", family.example, measure=False)
        return (Path(folder) / "net.onnx").read_bytes(), compact


def cut(name: str, folder: Path) -> tuple[Path, nn.Module]:
    """A cut model of this family, as a file in `folder` and as a module."""
    content, compact = exported(name)
    (folder / "net.onnx").write_bytes(content)
    return folder / "net.onnx", copy.deepcopy(compact)


def tried(path: Path, runtime: str, module: nn.Module | None = None) -> RuntimeResult:
    missing = missing_packages(runtime)
    if missing:
        pytest.skip(f"NOT TRIED in {runtime}: {', '.join(missing)} not installed (make runtimes)")
    return verify_onnx(path, module, runtimes=[runtime], measure=False)[runtime]


CASES = [
    ("resnet", "onnxruntime"), ("resnet", "openvino"), ("resnet", "mnn"), ("resnet", "ncnn"), ("resnet", "executorch"),
    ("flownet", "openvino"), ("flownet", "mnn"), ("flownet", "ncnn"),
    ("style", "openvino"), ("style", "mnn"), ("style", "ncnn"),
    ("shuffle", "mnn"), ("shuffle", "openvino"), ("shuffle", "ncnn"),
    ("encoder", "openvino"), ("encoder", "mnn"), ("heads", "openvino"), ("heads", "mnn"), ("heads", "ncnn"),
    ("flownet", "executorch"), ("style", "executorch"), ("shuffle", "executorch"), ("encoder", "executorch"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "runtime"), CASES)
def test_cut_models_agree_in_other_runtimes(name: str, runtime: str, tmp_path: Path) -> None:
    path, compact = cut(name, tmp_path)
    before = path.read_bytes()
    result = tried(path, runtime, compact)
    assert result.status == "ok" and result.version, result
    assert result.relative_delta is not None and result.relative_delta < 5e-4
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before, "a converter wrote beside the file"


def test_a_wrong_conversion_is_noticed(tmp_path: Path) -> None:
    """pnnx (20261020) takes a look-up of several channels for one of a single channel, without a word. Simplified
    files have no such look-up; this one does."""
    gated = tgfx.transform(made("shuffle"), FAMILIES["shuffle"].example).eval()
    close_some(gated)
    tgfx.export_onnx(gated, tmp_path / "net.onnx", simplify=False, measure=False)
    result = tried(tmp_path / "net.onnx", "ncnn", tgfx.shrink(gated))
    assert result.status == "differs" and result.relative_delta is not None and result.relative_delta > 1e-2


def test_ncnn_says_which_layer_it_lacks(tmp_path: Path) -> None:
    path, _ = cut("encoder", tmp_path)
    result = tried(path, "ncnn")
    assert result.status == "failed" and "not exists" in result.reason


def test_ncnn_says_which_input_it_does_not_take(tmp_path: Path) -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
            return torch.where(which, x, -x)

    example = (torch.randn(1, 4), torch.tensor([[True, False, True, True]]))
    tgfx.export_onnx(Chosen().eval(), tmp_path / "net.onnx", example, measure=False)
    result = tried(tmp_path / "net.onnx", "ncnn")
    assert result.status == "failed" and "no input of type bool: which" in result.reason


def test_the_mnn_converter_does_not_bring_the_vendors_logger() -> None:
    """`import MNN.tools` would install a package into this Python and report home."""
    if missing_packages("mnn"):
        pytest.skip("NOT TRIED: MNN not installed (make runtimes)")
    code = "import sys, run_mnn; sys.exit(any(n.startswith(('MNN.tools', 'aliyun')) for n in sys.modules))"
    folder = Path(verify.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True).returncode == 0


def test_without_a_module_the_reference_is_onnx_runtime_itself(tmp_path: Path) -> None:
    path, _ = cut("cnn", tmp_path)
    report = verify_onnx(path, runtimes=["onnxruntime"], batch=5)
    assert report.ok and report.shapes == {"input": [5, 3, 12, 12]} and "without optimisations" in report.reference
    assert report["onnxruntime"].ms is not None and report["onnxruntime"].ms > 0
    assert "onnxruntime" in str(report) and report.to_dict()["ok"] is True


def test_another_model_than_the_file_is_noticed(tmp_path: Path) -> None:
    path, compact = cut("cnn", tmp_path)
    with torch.no_grad():
        compact.get_submodule("3").weight += 0.05  # type: ignore[operator]
    report = verify_onnx(path, compact, runtimes=["onnxruntime"], measure=False)
    assert not report.ok and report["onnxruntime"].status == "differs" and "output" in report["onnxruntime"].reason


def test_what_is_not_installed_is_skipped_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = cut("cnn", tmp_path)
    monkeypatch.setattr(verify, "RUNTIMES", {"onnxruntime": ("onnxruntime",), "toaster": ("no_such_runtime",)})
    with pytest.warns(UserWarning, match="not tried: toaster"):
        report = verify_onnx(path, measure=False)
    assert report.ok and report["toaster"].status == "skipped" and "no_such_runtime" in report["toaster"].reason
    with pytest.raises(MissingPackageError, match="toaster is not installed"):
        verify_onnx(path, runtimes=["toaster"])


def test_bad_files_and_arguments(tmp_path: Path) -> None:
    path, _ = cut("cnn", tmp_path)
    damaged = tmp_path / "damaged.onnx"
    for content in (b"", b"no onnx at all", path.read_bytes()[: path.stat().st_size // 2]):
        damaged.write_bytes(content)
        with pytest.raises(OnnxFileError):
            verify_onnx(damaged, runtimes=["onnxruntime"])
    with pytest.raises(OnnxFileError, match="no such file"):
        verify_onnx(tmp_path / "missing.onnx")
    with pytest.raises(InputError, match="unknown runtime"):
        verify_onnx(path, runtimes=["toaster"])
    with pytest.raises(InputError, match="do not fit the file"):
        verify_onnx(path, inputs={"x": torch.zeros(1)}, runtimes=["onnxruntime"])
    with pytest.raises(OnnxFileError, match="does not run"):
        verify_onnx(path, inputs={"input": torch.zeros(1, 2, 3, 4)}, runtimes=["onnxruntime"])


def test_a_converter_that_crashes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = cut("cnn", tmp_path)
    worker = tmp_path / "worker.py"
    worker.write_text("import os; os.abort()")
    monkeypatch.setattr("tgfx.runtimes.isolation.WORKER", worker)
    report = verify_onnx(path, runtimes=["onnxruntime"])
    assert not report.ok and "ended with code" in report["onnxruntime"].reason
