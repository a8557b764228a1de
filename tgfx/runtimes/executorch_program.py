"""A module as an ExecuTorch program: XNNPACK where its partitioner is there, portable kernels for the rest."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.subject import Subject, flat_result
from tgfx.onnx_export.tracing import no_fast_path


def write_program(subject: Subject, args: tuple[Any, ...], file: Path) -> None:
    """At the shapes of `args`."""
    with quietly(), torch.no_grad(), flat_result(subject.module), no_fast_path():
        exir = importlib.import_module("executorch.exir")  # warns and logs as it is imported
        program = torch.export.export(subject.module, args, strict=False)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=_partitioners())
        file.write_bytes(lowered.to_executorch().buffer)


def _partitioners() -> list[Any]:
    try:
        xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    except ImportError:  # its quantizer needs torchao
        return []
    return [xnnpack.XnnpackPartitioner()]
