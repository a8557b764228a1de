"""`tgfx explain`: why a layer can or cannot be cut, and what it is tied to."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tgfx.cli.inspecting import group_record
from tgfx.cli.loading import load_model, parse_inputs
from tgfx.cli.options import AsJson, Checkpoint, Input, Model
from tgfx.transforming import transform

Layer = Annotated[str, typer.Argument(help="a layer, parameter or group, e.g. layer1.0.conv2")]


def explain_command(
    model: Model, layer: Layer, input: Input = None, checkpoint: Checkpoint = None, as_json: AsJson = False
) -> None:
    """Which group a layer belongs to, tied to whom by what, and whether it can be cut."""
    gated = transform(load_model(model, checkpoint=checkpoint), parse_inputs(input or []))
    text = gated.explain(layer)
    if not as_json:
        return typer.echo(text)
    about = [
        group for group in gated.groups
        if group.name == layer or any(m.name == layer or m.name.rpartition(".")[0] == layer for m in group.members)
    ]  # fmt: skip
    typer.echo(json.dumps({"layer": layer, "groups": [group_record(group) for group in about]}, indent=2))
