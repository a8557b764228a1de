"""A float16 variant of an ONNX file, by onnxruntime's own converter."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tgfx.onnx_export.calibration import feeds_from
from tgfx.onnx_export.files import random_feeds, read_model
from tgfx.onnx_export.packages import needed
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.variant_check import compared, completed
from tgfx.onnx_export.variant_report import VariantReport
from tgfx.onnx_export.writing import checked_target, move_into_place, written_aside


def fp16_onnx(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    evaluation: Iterable[Any] | None = None,
    *,
    keep_io_types: bool = True,
    batches: int = 32,
    measure: bool = True,
) -> VariantReport:
    """Write a float16 variant; inputs and outputs stay float32 unless keep_io_types=False.

    The report compares it with the float32 file on `evaluation`, or on random numbers.
    """
    float16 = needed("onnxruntime.transformers.float16", purpose="tgfx.fp16_onnx")
    onnx = needed("onnx")
    source, target = Path(path), checked_target(out)
    model = read_model(source)
    judged = [random_feeds(model, seed=n) for n in range(4)]
    if evaluation is not None:
        judged = list(feeds_from(evaluation, model, batches))
    with written_aside(target) as aside:
        with quietly():
            half = float16.convert_float_to_float16(onnx.load(str(source)), keep_io_types=keep_io_types)
        onnx.save(half, str(aside))
        completed(aside, model, "float16")
        report = compared(source, aside, target, "float16", judged, measure)
        if evaluation is None:
            report.notes.append("judged on random numbers; pass evaluation= for real ones")
        move_into_place(aside, target)
    return report
