"""The end of the demo: ONNX files, their parity and their speed."""

from __future__ import annotations

import copy
from pathlib import Path

import onnxruntime
import torch
from rich.table import Table
from torch import Tensor

import tgfx

MULTIPLE = 4  # ONNX Runtime's convolutions work on blocks of channels; odd counts can cost more than they save


def export_both(gated: tgfx.GatedModule, budget: float, batch: Tensor, folder: Path) -> list[tgfx.OnnxReport]:
    """The cut as it was learned, and one within the same budget whose sizes are multiples."""
    folder.mkdir(exist_ok=True)
    rounded = copy.deepcopy(gated).eval()
    tgfx.finish(rounded, flops=budget, round_to=MULTIPLE)
    return [
        tgfx.export_onnx(gated, folder / "digits.onnx", batch),
        tgfx.export_onnx(rounded, folder / f"digits_{MULTIPLE}.onnx", batch),
    ]


def side_by_side(reports: list[tgfx.OnnxReport], held_out: tuple[Tensor, Tensor]) -> Table:
    table = Table(title="In ONNX Runtime")
    for header in ("", "original", *(report.path.name for report in reports)):
        table.add_column(header, justify="right" if header else "left")
    whole = reports[0].sizes["original"]
    table.add_row("nodes", f"{whole.nodes}", *(f"{report.nodes}" for report in reports))
    table.add_row("bytes", f"{whole.bytes:,}", *(f"{report.bytes:,}" for report in reports))
    for place, timing in enumerate(reports[0].timings):
        times = [report.timings[place] for report in reports]
        cells = (f"{own.compact:.2f} ({own.speedup:.2f}x)" for own in times)
        table.add_row(f"ms per batch, {timing.threads} thread(s)", f"{timing.original:.2f}", *cells)
    table.add_row("max |ONNX Runtime - torch|", "", *(f"{max(report.max_delta.values()):.1e}" for report in reports))
    table.add_row("accuracy", "", *(f"{_accuracy(report.path, held_out):.2%}" for report in reports))
    return table


def _accuracy(path: Path, held_out: tuple[Tensor, Tensor]) -> float:
    images, labels = held_out
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"x": images.numpy()})
    return (torch.from_numpy(scores).argmax(1) == labels).float().mean().item()
