"""A variant beside its float32 model: sound, usable, and how near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tgfx.errors import VerificationError
from tgfx.onnx_export.files import read_model
from tgfx.onnx_export.measuring import timings
from tgfx.onnx_export.metadata import set_metadata
from tgfx.onnx_export.parity import delta, top1_agreement
from tgfx.onnx_export.session import Feeds, open_session, run
from tgfx.onnx_export.variant_report import Closeness, VariantReport
from tgfx.optional_packages import needed

_NUMPY = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


def completed(aside: Path, source: Any, kind: str) -> None:
    """Put nodes in order (the float16 converter appends its casts) and take over what the source says of itself."""
    onnx_ir = needed("onnx_ir")
    model = onnx_ir.load(aside)
    model.graph.sort()
    proto = onnx_ir.to_proto(model)
    entries = {entry.key: entry.value for entry in source.metadata_props}
    set_metadata(proto, {**entries, "tgfx.variant": kind})
    aside.write_bytes(proto.SerializeToString())


def compared(source: Path, aside: Path, target: Path, kind: str, judged: list[Feeds], measure: bool) -> VariantReport:
    read_model(aside)
    whole, small = open_session(source), open_session(aside)
    types = {value.name: _NUMPY.get(value.type) for value in small.get_inputs()}
    pairs: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    samples = 0
    for feeds in judged:
        samples += len(next(iter(feeds.values())))
        cast = {k: v.astype(types[k]) if types.get(k) else v for k, v in feeds.items()}
        found = run(small, cast)
        for name, value in run(whole, feeds).items():
            expected, answers = pairs.setdefault(name, ([], []))
            expected.append(value)
            answers.append(found[name].astype(value.dtype))
    outputs = {name: _closeness(name, np.concatenate(a), np.concatenate(b)) for name, (a, b) in pairs.items()}
    report = VariantReport(target, kind, source.stat().st_size, aside.stat().st_size, outputs, samples)
    if measure and types == {value.name: _NUMPY.get(value.type) for value in whole.get_inputs()}:
        report.timings = timings(aside, source, judged[0])
    return report


def _closeness(name: str, expected: np.ndarray, found: np.ndarray) -> Closeness:
    gap = delta(expected, found)
    if not np.isfinite(gap.largest):
        raise VerificationError(
            "the variant gives no usable numbers; it is not handed out",
            expected=f"finite values in {name}",
            found=f"{int((~np.isfinite(found)).sum())} that are not",
            fix="values too large for float16: keep float32" if found.dtype.kind == "f" else None,
        )
    return Closeness(gap.largest, gap.mean, top1_agreement(expected, found))
