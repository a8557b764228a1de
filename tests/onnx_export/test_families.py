"""Every family of networks leaves torch cut, proven and runnable at other batch sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.export_models import FAMILIES, Family, made
from tests.support.head_promises import close_some
from tgfx.onnx_export.naming import named_outputs


def gated_at_random(name: str) -> tgfx.GatedModule:
    family = FAMILIES[name]
    gated = tgfx.transform(made(name), family.example, granularity=family.granularity).eval()
    close_some(gated)
    return gated


def batch_of(family: Family, size: int) -> tuple[Tensor, ...]:
    """Fresh rows, not the ones that the export was proven with."""
    given = family.example if isinstance(family.example, tuple) else (family.example,)
    dice = torch.Generator().manual_seed(7)
    return tuple(
        torch.randn(size, *one.shape[1:], generator=dice)
        if one.is_floating_point()
        else torch.randint(0, 20, (size, *one.shape[1:]), generator=dice)
        for one in given
    )


def onnx_run(path: Path, inputs: tuple[Tensor, ...]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: given.numpy() for value, given in zip(session.get_inputs(), inputs, strict=True)}
    return dict(zip(names, session.run(None, feeds), strict=True))


def agree(path: Path, model: Any, inputs: tuple[Tensor, ...], tolerance: float = 2e-5) -> None:
    with torch.no_grad():
        expected = named_outputs(model(*inputs))
    found = onnx_run(path, inputs)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        gap = np.abs(found[name] - tensor.numpy()).max() / max(1e-6, tensor.abs().max().item())
        assert gap <= tolerance, f"{name}: {gap}"


@pytest.mark.parametrize("name", FAMILIES)
def test_gated_models_are_shrunk_and_run_at_any_batch(name: str, tmp_path: Path) -> None:
    gated = gated_at_random(name)
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    assert report.simplified_by == "onnxsim" and report.checked == ["batch 1", "batch 2", "batch 3"]
    assert all(shape[0] == "batch" for shape in (*report.inputs.values(), *report.outputs.values()))
    for size in (1, 5):
        agree(tmp_path / "net.onnx", gated, batch_of(FAMILIES[name], size))
    weights = sum(parameter.numel() for parameter in tgfx.shrink(gated).parameters())
    assert report.sizes["written"].parameters <= weights + 200, "more weights than the compact model has"


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_models_at_fixed_shapes(name: str, tmp_path: Path) -> None:
    model, family = made(name), FAMILIES[name]
    report = tgfx.export_onnx(model, tmp_path / "net.onnx", family.example, dynamic_batch=False, measure=False)
    assert report.checked == ["batch 1"]
    assert all(isinstance(size, int) for shape in report.inputs.values() for size in shape)
    agree(tmp_path / "net.onnx", model, batch_of(family, 1))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.any_size])
def test_compact_models_at_any_size(name: str, tmp_path: Path) -> None:
    gated, family = gated_at_random(name), FAMILIES[name]
    report = tgfx.export_onnx(
        tgfx.shrink(gated), tmp_path / "net.onnx", family.example, dynamic_size=True, measure=False
    )
    assert len(report.checked) == 4 and "size2" in report.checked[-1]
    inputs = tuple(torch.randn(3, one.shape[1], 40, 24) for one in batch_of(family, 1))
    agree(tmp_path / "net.onnx", gated, inputs)


class Depthwise(nn.Module):
    """A shuffle with channel-wise layers before the next full convolution, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d, self.b = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        n, c, h, w = y.shape
        y = y.view(n, 3, c // 3, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.b(F.hardswish(self.d(F.max_pool2d(y, 2))))


@pytest.mark.parametrize("make", [lambda: made("shuffle"), lambda: Depthwise().eval()], ids=["plain", "depthwise"])
def test_a_ragged_shuffle_goes_into_the_weights(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = torch.randn(1, 3, 10, 10)
    gated = tgfx.transform(make(), example).eval()
    gated.gates["a"].set_open_(torch.arange(12) != 3)  # 11 channels: no rectangle
    raw = tgfx.export_onnx(gated, tmp_path / "raw.onnx", simplify=False, measure=False)
    assert raw.ops["Gather"] == 1 and "Transpose" not in raw.ops
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    assert report.simplified_by == "onnxsim" and "Gather" not in report.ops
    for file in ("raw.onnx", "net.onnx"):
        agree(tmp_path / file, gated, (torch.randn(3, 3, 10, 10),))


def test_removed_heads_are_not_in_the_file(tmp_path: Path) -> None:
    gated = gated_at_random("heads")
    (gate,) = gated.gates.values()
    gate.set_open_(torch.tensor([True, False, False, True]))
    report = tgfx.export_onnx(gated, tmp_path / "net.onnx", measure=False)
    shapes = [tuple(tensor.dims) for tensor in onnx.load(tmp_path / "net.onnx").graph.initializer]
    assert not any(48 in shape for shape in shapes), "the projection still has 3 * 16 rows"
    assert report.metadata["tgfx.kept"].count('"kept": 2, "of": 4') == 1
