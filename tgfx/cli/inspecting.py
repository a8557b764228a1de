"""`tgfx inspect`: the report of a model as a table, or as JSON."""

from __future__ import annotations

import json
from typing import Any

import typer

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.cli.options import AsJson, Checkpoint, Granularity, Ignore, Input, Model
from tgfx.passes.couple import Group
from tgfx.transforming import transform


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
