"""`tgfx export`: a model, cut by a plan if there is one, as a proven ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tgfx.cli.options import AsJson, Checkpoint, Input, Model, Plan, model_and_example
from tgfx.onnx_export.export import export_onnx

Output = Annotated[Path, typer.Option("--output", "-o", help="the file to write, ending in .onnx")]
Profile = Annotated[str | None, typer.Option(help="nnapi, coreml, ncnn, mnn or ort-mobile")]
Opset = Annotated[int, typer.Option(help="version of the ONNX operators")]
FixedBatch = Annotated[bool, typer.Option("--fixed-batch", help="keep the example's batch size")]
DynamicSize = Annotated[bool, typer.Option("--dynamic-size", help="leave height, width or length free too")]
Raw = Annotated[bool, typer.Option("--no-simplify", help="as torch writes it")]
Quick = Annotated[bool, typer.Option("--no-measure", help="without timing")]


def export_command(
    model: Model,
    output: Output,
    input: Input = None,
    checkpoint: Checkpoint = None,
    plan: Plan = None,
    profile: Profile = None,
    opset: Opset = 18,
    fixed_batch: FixedBatch = False,
    dynamic_size: DynamicSize = False,
    no_simplify: Raw = False,
    no_measure: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as ONNX, compared with torch before the file appears."""
    subject, whole, example = model_and_example(model, input, checkpoint, plan)
    report = export_onnx(
        subject,
        output,
        example,
        simplify=not no_simplify,
        dynamic_batch=not fixed_batch,
        dynamic_size=dynamic_size,
        opset=opset,
        profile=profile,
        original=whole if plan is not None else None,
        measure=not no_measure,
    )
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
