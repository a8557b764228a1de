"""`tgfx view`: a model as a page, or a run that `tgfx.fit(..., live=folder)` is at, followed in the browser."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tgfx.cli.loading import load_model, parse_inputs
from tgfx.cli.options import AsJson, Checkpoint, Input
from tgfx.view.data import page_data
from tgfx.view.files import write_whole
from tgfx.view.page import page
from tgfx.view.server import LiveServer

Subject = Annotated[str, typer.Argument(help="package.module:factory, file.py:factory, or the folder of a live run")]
Output = Annotated[Path, typer.Option("--output", "-o", help="the page")]
Port = Annotated[int, typer.Option(help="for a live run; 0 takes any that is free", min=0, max=65535)]
Open = Annotated[bool, typer.Option("--open/--no-open", help="show it in the browser")]


def view_command(
    subject: Subject,
    input: Input = None,
    checkpoint: Checkpoint = None,
    output: Output = Path("graph.html"),
    port: Port = 0,
    open: Open = True,
    as_json: AsJson = False,
) -> None:
    """One page with the graph, the groups, the gates and the price. --json prints its data instead."""
    if Path(subject).is_dir():
        return serve(Path(subject), port, open)
    data = page_data(load_model(subject, checkpoint=checkpoint), parse_inputs(input or []))
    if as_json:
        return typer.echo(json.dumps(data, allow_nan=False))
    written = write_whole(output, page(data)).resolve()
    typer.echo(f"written: {output}")
    if open:
        webbrowser.open(written.as_uri())


def serve(folder: Path, port: int, open: bool) -> None:
    """Until Ctrl-C."""
    with LiveServer(folder, port) as server:
        typer.echo(f"serving {folder} at {server.url} (Ctrl-C ends)")
        if open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("ended")
