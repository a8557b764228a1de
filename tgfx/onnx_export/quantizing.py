"""An int8 variant of an ONNX file, by onnxruntime's own quantizer: pruned and quantised together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgfx.errors import ExportError
from tgfx.onnx_export.calibration import feeds_from
from tgfx.onnx_export.files import read_model
from tgfx.onnx_export.node_facts import setting
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.session import Feeds
from tgfx.onnx_export.variant_check import compared, completed
from tgfx.onnx_export.variant_report import VariantReport
from tgfx.onnx_export.writing import checked_target, move_into_place, written_aside
from tgfx.optional_packages import needed

KEPT = "onnxruntime has no scales per channel for transposed convolutions with groups"


def quantize_onnx(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    calibration: Iterable[Any],
    *,
    evaluation: Iterable[Any] | None = None,
    batches: int = 32,
    per_channel: bool = True,
    measure: bool = True,
) -> VariantReport:
    """Write an int8 variant (static, QDQ: scales measured on `batches` batches of the calibration loader).

    The report compares it with the float32 file on `evaluation`, or on the calibration batches again.
    """
    quantization = needed("onnxruntime.quantization", purpose="tgfx.quantize_onnx")
    source, target = Path(path), checked_target(out)
    model = read_model(source)
    measured = list(feeds_from(calibration, model, batches))
    judged = list(feeds_from(evaluation, model, batches)) if evaluation is not None else measured
    with written_aside(target) as aside:
        with quietly():
            prepared = aside.with_name("prepared.onnx")
            quantization.shape_inference.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            kept = _grouped_transposed(prepared) if per_channel else []
            try:
                quantization.quantize_static(
                    str(prepared),
                    str(aside),
                    _Reader(measured),
                    quant_format=quantization.QuantFormat.QDQ,
                    per_channel=per_channel,
                    nodes_to_exclude=kept,
                )
            except Exception as error:
                raise ExportError(
                    "onnxruntime's quantizer does not take the model; no variant is written",
                    expected="a model that quantize_static takes, and batches that fit it",
                    found=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
                    fix="per_channel=False may help" if per_channel else None,
                ) from error
            prepared.unlink()
        completed(aside, model, "int8")
        report = compared(source, aside, target, "int8, static QDQ", judged, measure)
        if evaluation is None:
            report.notes.append("judged on the calibration batches; pass evaluation= for others")
        if kept:
            report.notes.append(f"{', '.join(kept)} stay float32: {KEPT}; per_channel=False takes them too")
        move_into_place(aside, target)
    return report


def _grouped_transposed(prepared: Path) -> list[str]:
    """onnxruntime 1.31 counts the output channels of one group only where it wants a scale for each of them all."""
    nodes = needed("onnx").load(str(prepared), load_external_data=False).graph.node
    return [node.name for node in nodes if node.op_type == "ConvTranspose" and setting(node, "group", 1) > 1]


class _Reader:
    """What onnxruntime's calibrators ask for the next inputs."""

    def __init__(self, feeds: list[Feeds]) -> None:
        self.feeds = feeds
        self.rewind()

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left = iter(self.feeds)

    def __len__(self) -> int:
        return len(self.feeds)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._left = iter(self.feeds[start_index:end_index])
