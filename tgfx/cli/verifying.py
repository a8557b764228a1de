"""`tgfx verify`: an ONNX file in every runtime at hand."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from tgfx.cli.options import AsJson, Checkpoint, Plan, model_and_example
from tgfx.errors import InputError
from tgfx.runtimes.verify import verify_onnx

FAILED = 1

File = Annotated[Path, typer.Argument(help="the ONNX file")]
Runtime = Annotated[list[str] | None, typer.Option("--runtime", "-r", help="only this one; may be repeated")]
Module = Annotated[
    str | None, typer.Option("--model", help="package.module:factory of the same model, to compare with torch")
]
Size = Annotated[list[str] | None, typer.Option("--size", help="size of a free axis, e.g. x_size2=64")]
Batch = Annotated[int | None, typer.Option(help="batch size to try")]
Tolerance = Annotated[float | None, typer.Option(help="largest difference, of the largest entry")]


def verify_command(
    file: File,
    runtime: Runtime = None,
    model: Module = None,
    checkpoint: Checkpoint = None,
    plan: Plan = None,
    size: Size = None,
    batch: Batch = None,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """Load a file in each installed runtime, compare and time it. Exit code 1 if one fails or differs."""
    module = None if model is None else model_and_example(model, None, checkpoint, plan)[0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = verify_onnx(file, module, runtimes=runtime, sizes=_sizes(size or []), batch=batch, tolerance=tolerance)
    for warning in said:
        if issubclass(warning.category, UserWarning):
            typer.echo(f"warning: {warning.message}", err=True)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _sizes(texts: list[str]) -> dict[str, int]:
    sizes = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.isdigit() or int(number) < 1:
            raise InputError("a size cannot be understood", expected="name=number, e.g. x_size2=64", found=repr(text))
        sizes[name] = int(number)
    return sizes
