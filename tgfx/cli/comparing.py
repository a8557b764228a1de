"""`tgfx compare`: two ONNX files side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tgfx.cli.options import AsJson
from tgfx.onnx_export.comparing import compare_onnx

First = Annotated[Path, typer.Argument(help="an ONNX file")]
Second = Annotated[Path, typer.Argument(help="another one")]


def compare_command(first: First, second: Second, as_json: AsJson = False) -> None:
    """Nodes, bytes, FLOPs, milliseconds in ONNX Runtime, and how far outputs are apart."""
    comparison = compare_onnx(first, second)
    typer.echo(json.dumps(comparison.to_dict(), indent=2) if as_json else str(comparison))
