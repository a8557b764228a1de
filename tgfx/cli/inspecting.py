"""`tgfx inspect`: the report of a model as a table, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.transforming import transform

Model = Annotated[str, typer.Argument(help="package.module:factory or file.py:factory")]
Input = Annotated[
    list[str] | None, typer.Option("--input", "-i", help="example input, e.g. 1x3x224x224 or ids=2x16:int64")
]
Checkpoint = Annotated[Path | None, typer.Option("--checkpoint", help="state dict to load (torch or safetensors)")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]


def inspect_command(model: Model, input: Input = None, checkpoint: Checkpoint = None, as_json: AsJson = False) -> None:
    """What can be gated in a model, what is tied, what is kept and why."""
    gated = transform(load_model(model, checkpoint=checkpoint), parse_inputs(input or []))
    if not as_json:
        typer.echo(str(gated.report()))
        return
    groups = [
        {
            "name": group.name,
            "size": group.size,
            "kind": group.kind,
            "frozen": None if group.frozen is None else str(group.frozen),
        }
        for group in gated.groups
    ]
    typer.echo(json.dumps({"total": {kind: gated.total(kind) for kind in gated.kinds}, "groups": groups}, indent=2))
