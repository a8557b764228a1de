"""`tgfx inspect`: the report of a model as a table, or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.passes.couple import Group
from tgfx.transforming import transform

Model = Annotated[str, typer.Argument(help="package.module:factory or file.py:factory")]
Input = Annotated[
    list[str] | None, typer.Option("--input", "-i", help="example input, e.g. 1x3x224x224 or ids=2x16:int64")
]
Checkpoint = Annotated[Path | None, typer.Option("--checkpoint", help="state dict to load (torch or safetensors)")]
AsJson = Annotated[bool, typer.Option("--json", help="for machines")]
Granularity = Annotated[
    list[str] | None,
    typer.Option("--granularity", "-g", help="channel (default), head, layer, weight; several times"),
]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", help="a layer's name or glob pattern; may be repeated")]


def inspect_command(
    model: Model,
    input: Input = None,
    checkpoint: Checkpoint = None,
    granularity: Granularity = None,
    ignore: Ignore = None,
    as_json: AsJson = False,
) -> None:
    """What can be gated in a model, what is tied, what is kept and why."""
    gated = transform(
        load_model(model, checkpoint=checkpoint),
        parse_inputs(input or []),
        granularity=tuple(granularity) if granularity else "channel",
        ignore=tuple(ignore or ()),
    )
    if not as_json:
        typer.echo(str(gated.report()))
        return
    groups = [group_record(group) for group in gated.groups]
    typer.echo(json.dumps({"total": {kind: gated.total(kind) for kind in gated.kinds}, "groups": groups}, indent=2))


def group_record(group: Group) -> dict[str, Any]:
    """A group for machines."""
    return {
        "name": group.name,
        "size": group.size,
        "kind": group.kind,
        "frozen": None if group.frozen is None else str(group.frozen),
        "members": [str(member) for member in group.members],
        "tied_by": [{"op": tie.op, "node": tie.node, "source": tie.source} for tie in group.ties],
    }
