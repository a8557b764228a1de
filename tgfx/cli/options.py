"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.plan import load_plan

Model = Annotated[str, typer.Argument(help="package.module:factory or file.py:factory")]
Input = Annotated[
    list[str] | None, typer.Option("--input", "-i", help="example input, e.g. 1x3x224x224 or ids=2x16:int64")
]
Checkpoint = Annotated[Path | None, typer.Option("--checkpoint", help="state dict to load (torch or safetensors)")]
Plan = Annotated[Path | None, typer.Option("--plan", help="folder that tgfx.save_plan wrote: the cut and its weights")]
Granularity = Annotated[
    list[str] | None,
    typer.Option("--granularity", "-g", help="channel (default), connection, tap, head, layer, weight; several times"),
]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", help="a layer's name or glob pattern; may be repeated")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]


def model_and_example(
    spec: str, inputs: list[str] | None, checkpoint: Path | None, plan: Path | None
) -> tuple[nn.Module, nn.Module, Any]:
    """(the model to work on, the one before its cut, the example or None). Without a plan both are the same."""
    example = parse_inputs(inputs or [])
    whole = load_model(spec, checkpoint=checkpoint)
    if plan is None:
        return whole, whole, example
    return load_plan(plan, whole, example).eval(), whole, example
