"""What cannot be exported is said before, and never leaves half a file."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.export_models import FAMILIES, made
from tgfx import optional_packages as packages
from tgfx.errors import ExportError, InputError, MissingPackageError, VerificationError
from tgfx.onnx_export import export as exporting
from tgfx.onnx_export import simplifying

EXAMPLE = FAMILIES["cnn"].example


def export(model: Any, path: Path, example: Any = EXAMPLE, **options: Any) -> tgfx.OnnxReport:
    return tgfx.export_onnx(model, path, example, measure=False, **options)


class Bessel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(self.a(x))  # ONNX has no such thing


def line_of(text: str, file: str = __file__) -> str:
    lines = Path(file).read_text().splitlines()
    return f"{Path(file).name}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.parametrize("place", ["missing/net.onnx", "net.txt", "folder.onnx"])
def test_paths_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ExportError, match="cannot be written"):
        export(made("cnn"), tmp_path / place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match="may not write"):
        export(made("cnn"), tmp_path / "net.onnx")


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no path"):
        export(made("cnn"), 5)  # type: ignore[arg-type]
    if Path("/proc").is_dir():  # writable for root by its rights, but no file can be made there
        with pytest.raises(ExportError, match="may not write"):
            export(made("cnn"), Path("/proc/net.onnx"))


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(tmp_path / "real.onnx")
    export(made("cnn"), tmp_path / "link.onnx")
    assert (tmp_path / "link.onnx").is_symlink() and onnx.load(tmp_path / "real.onnx").graph.node


def test_an_empty_example(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty"):
        export(made("cnn"), tmp_path / "net.onnx", torch.zeros(0, 3, 12, 12))


def test_types_and_layers_that_are_not_ready(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be compared") as caught:
        export(made("cnn").bfloat16(), tmp_path / "net.onnx", EXAMPLE.bfloat16())
    assert caught.value.found == "torch.bfloat16" and caught.value.where == "0.weight"
    with pytest.raises(InputError, match="not built yet"):
        export(nn.Sequential(nn.LazyLinear(3)).eval(), tmp_path / "net.onnx", torch.randn(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_compiled_modules_are_taken_and_scripted_ones_are_not(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting, and scripts something where it compiles
        compiled, scripted = torch.compile(made("cnn")), torch.jit.script(made("cnn"))
    report = export(compiled, tmp_path / "net.onnx")
    assert report.model == "Sequential" and report.metadata["tgfx.model"] == "Sequential"
    with pytest.raises(InputError, match="scripted module"):
        export(scripted, tmp_path / "net.onnx")


def test_a_single_number_comes_out(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).mean()

    report = export(Loss().eval(), tmp_path / "net.onnx", torch.randn(2, 3))
    assert report.outputs == {"output": ()} and report.checked == ["batch 1", "batch 2", "batch 3"]


def test_sizes_that_cannot_be_freed_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Trying other sizes must not print what the traced model says about them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    compact = tgfx.shrink(tgfx.transform(model, torch.randn(1, 3, 8, 8)))
    report = export(compact, tmp_path / "net.onnx", torch.randn(1, 3, 8, 8), dynamic_size=True)
    assert report.inputs == {"input": ("batch", 3, 8, 8)}
    assert any("freed nothing" in note for note in report.notes)
    assert capfd.readouterr().err == ""


def test_a_write_that_fails_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ExportError, match="No space left"):
        export(made("cnn"), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_operator_without_onnx_form_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="bessel_j0 has no ONNX form") as caught:
        export(Bessel().eval(), tmp_path / "net.onnx", torch.randn(1, 4))
    assert line_of("# ONNX has no such thing") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_what_was_called_has_its_line_too(tmp_path: Path) -> None:
    """svdvals becomes _linalg_svd on the way, which is nowhere in the user's program."""

    class Singular(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x + 1.0)  # no singular values in ONNX

    with pytest.raises(ExportError, match="_linalg_svd has no ONNX form") as caught:
        export(Singular().eval(), tmp_path / "net.onnx", torch.randn(1, 4, 4))
    assert line_of("# no singular values") in str(caught.value.where)


def test_the_line_is_found_from_a_compact_model_too(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.special.bessel_j1(self.a(x)))  # nor this

    gated = tgfx.transform(Wrapped().eval(), torch.randn(1, 4)).eval()
    with pytest.raises(ExportError, match="bessel_j1 has no ONNX form") as caught:
        export(gated, tmp_path / "net.onnx", None)
    assert line_of("# nor this") in str(caught.value)


def test_examples_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(InputError, match="does not run on the example"):
        export(made("cnn"), path, torch.randn(1, 4, 12, 12))
    with pytest.raises(InputError, match="does not run on the example"):
        export(made("cnn"), path, {"pictures": EXAMPLE})
    with pytest.raises(InputError, match="cannot be used"):
        export(made("cnn"), path, "an image")
    with pytest.raises(InputError, match="only a module"):
        export("model", path)
    with pytest.raises(InputError, match="unknown opset"):
        export(made("cnn"), path, opset=3)
    with pytest.raises(InputError, match="unknown profile"):
        export(made("cnn"), path, profile="toaster")
    with pytest.raises(InputError, match="cannot be written"):
        export(made("cnn"), path, metadata={"epoch": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_wants_its_batch_size(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).view(2, 4)

    with pytest.raises(ExportError, match="dynamic_batch=False"):
        export(Fixed().eval(), tmp_path / "net.onnx", torch.randn(2, 4))
    report = export(Fixed().eval(), tmp_path / "net.onnx", torch.randn(2, 4), dynamic_batch=False)
    assert report.inputs == {"x": (2, 4)} and report.checked == ["batch 2"]


def test_train_mode_is_said_and_left_alone(tmp_path: Path) -> None:
    model = made("cnn").train()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="train mode"):
        report = export(model, tmp_path / "net.onnx")
    assert any("train mode" in note for note in report.notes)
    assert model.training and not model[1].training and model[4].training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    model = made("cnn")
    model[3].weight.data[2, 1] = float("nan")
    with pytest.raises(InputError, match="not numbers") as caught:
        export(model, tmp_path / "net.onnx")
    assert "3.weight" in str(caught.value) and "9 of" in str(caught.value)


def test_outputs_that_are_not_numbers(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x)

    with pytest.raises(InputError, match="equality would prove nothing"):
        export(Root().eval(), tmp_path / "net.onnx", torch.tensor([[-1.0]]))


def test_an_existing_file_survives_a_failed_export(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    export(made("cnn"), path)
    before = path.read_bytes()
    with pytest.raises(ExportError):
        export(Bessel().eval(), path, torch.randn(1, 4))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    export(made("resnet"), path)
    assert path.read_bytes() != before and list(tmp_path.iterdir()) == [path]


def spoiled(raw: Any) -> Any:
    """A simplifier that gets one weight wrong."""
    model = onnx.ModelProto()
    model.CopyFrom(raw)
    (weight,) = [tensor for tensor in model.graph.initializer if list(tensor.dims) == [12, 8, 3, 3]]
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0] += 0.1
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    return model


def test_a_wrong_simplifier_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplifying, "_onnxsim", spoiled)
    report = export(made("cnn"), tmp_path / "net.onnx")
    assert report.simplified_by == "onnxslim" and "onnxsim was of no use" in report.notes[0]
    monkeypatch.setattr(simplifying, "_onnxslim", spoiled)
    with pytest.warns(UserWarning, match="not simplified"):
        report = export(made("cnn"), tmp_path / "net.onnx")
    assert report.simplified_by == ""


def test_a_graph_that_differs_is_refused_at_its_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "candidates", lambda raw, wanted: iter([("", lambda: spoiled(raw))]))
    with pytest.raises(VerificationError, match="does not compute what torch does") as caught:
        export(made("cnn"), tmp_path / "net.onnx")
    assert "Conv" in str(caught.value.where) and "layer 4" in str(caught.value.where)  # fused into its batch norm
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_was_fixed_on_the_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(raw: Any) -> Any:
        model = onnx.ModelProto()
        model.CopyFrom(raw)
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
        return model

    monkeypatch.setattr(exporting, "candidates", lambda raw, wanted: iter([("", lambda: fixed(raw))]))
    with pytest.raises(VerificationError, match="no longer free"):
        export(made("resnet"), tmp_path / "net.onnx")


def test_over_two_gigabytes_weights_go_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered: nobody wants to write 2 GB in a test."""
    monkeypatch.setattr(exporting, "LARGEST", 1000)
    path = tmp_path / "net.onnx"
    for name in ("resnet", "cnn"):  # the second time the first one's weights go
        with pytest.warns(UserWarning, match="not simplified"):
            report = export(made(name), path)
        (data,) = [file for file in tmp_path.iterdir() if file != path]
        assert data.suffix == ".data" and data.stat().st_size > 3000
        assert report.bytes == path.stat().st_size + data.stat().st_size
    onnx.checker.check_model(str(path), full_check=True)
    assert {entry.key for entry in onnx.load(path).metadata_props} >= {"tgfx.version"}


def test_a_missing_package_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(packages.importlib, "import_module", without)
    with pytest.raises(MissingPackageError, match=r"tgfx\[onnx\]"):
        export(made("cnn"), tmp_path / "net.onnx")


@dataclass
class Both:
    first: Tensor
    rest: list[Tensor]


def test_names_of_inputs_and_outputs(tmp_path: Path) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, left: Tensor, *, right: Tensor, scale: float = 2.0) -> Both:
            return Both(self.a(left) * scale, [right, left + right])

    model, path = Several().eval(), tmp_path / "net.onnx"
    given = {"left": torch.randn(1, 3), "right": torch.randn(1, 3), "scale": 3.0}
    report = export(model, path, given, metadata={"author": "me"})
    assert report.inputs == {"left": ("batch", 3), "right": ("batch", 3)}
    assert report.outputs == {"first": ("batch", 2), "rest_0": ("batch", 3), "rest_1": ("batch", 3)}
    assert {e.key: e.value for e in onnx.load(path).metadata_props}["author"] == "me"
    assert "rest_1 [batch, 3]" in str(report) and report.to_dict()["path"] == str(path)
    session = exporting.needed("onnxruntime").InferenceSession(path)
    left, right = np.ones((4, 3), np.float32), np.full((4, 3), 2, np.float32)
    first, rest_0, rest_1 = session.run(None, {"left": left, "right": right})
    expected = model(torch.from_numpy(left), right=torch.from_numpy(right), scale=3.0)
    assert np.abs(first - expected.first.detach().numpy()).max() < 1e-6
    assert (rest_0 == right).all() and (rest_1 == 3).all()


def test_nothing_about_this_machine_is_in_the_file(tmp_path: Path) -> None:
    export(made("flownet"), tmp_path / "net.onnx", FAMILIES["flownet"].example)
    raw = (tmp_path / "net.onnx").read_bytes()
    assert b"export_models" not in raw and str(Path.cwd()).encode() not in raw
