"""A float16 variant of an ONNX file, by onnxruntime's own converter."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tgfx.errors import VerificationError
from tgfx.onnx_export.calibration import feeds_from
from tgfx.onnx_export.files import random_feeds, read_model
from tgfx.onnx_export.inner_values import inner_values
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.session import Feeds
from tgfx.onnx_export.variant_check import compared, completed
from tgfx.onnx_export.variant_report import VariantReport
from tgfx.onnx_export.writing import checked_target, move_into_place, written_aside
from tgfx.optional_packages import needed

LARGEST = 65504.0  # of float16
# Masks say "minus infinity" with the lowest float32, which the converter turns into the lowest float16.
STAND_IN = float(np.finfo(np.float32).max) / 2


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
    whole = onnx.load(str(source))
    _check_range(whole, judged[0])
    with written_aside(target) as aside:
        with quietly():
            half = float16.convert_float_to_float16(whole, keep_io_types=keep_io_types)
        onnx.save(half, str(aside))
        completed(aside, model, "float16")
        report = compared(source, aside, target, "float16", judged, measure)
        if evaluation is None:
            report.notes.append("judged on random numbers; pass evaluation= for real ones")
        report.notes.append("ONNX Runtime's CPU computes many float16 operators in float32; devices may round more")
        move_into_place(aside, target)
    return report


def _check_range(model: Any, feeds: Feeds) -> None:
    """A device that computes in float16 has no numbers beyond 65504; this CPU's float32 would hide that."""
    producers = {output: node for node in model.graph.node for output in node.output}
    for name, value in inner_values(model, feeds).items():
        if value.dtype != np.float32 or not value.size:
            continue
        sizes = np.abs(value)
        largest = float(sizes[sizes < STAND_IN].max(initial=0.0))
        if largest > LARGEST and name in producers:
            raise VerificationError(
                "the model has values that float16 cannot hold; no variant is written",
                expected=f"nothing above {LARGEST:,.0f}",
                found=f"{largest:,.0f} in {name}",
                where=f"{producers[name].op_type} '{producers[name].name}'",
                fix="scale these layers, or stay with float32",
            )
