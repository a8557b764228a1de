"""The `tgfx` command: its subcommands, and what a failure looks like in a shell."""

from __future__ import annotations

import sys

import typer

from tgfx._version import __version__
from tgfx.cli.comparing import compare_command
from tgfx.cli.demo import demo_command
from tgfx.cli.explaining import explain_command
from tgfx.cli.exporting import export_command
from tgfx.cli.inspecting import inspect_command
from tgfx.cli.verifying import verify_command
from tgfx.cli.viewing import view_command
from tgfx.errors import TgfxError

FAILED = 1  # a tgfx error; 2 is what click gives for a command line that cannot be understood

app = typer.Typer(
    name="tgfx",
    help="Gates, prices and exactly prunes PyTorch models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect_command)
app.command("explain")(explain_command)
app.command("view")(view_command)
app.command("demo")(demo_command)
app.command("export")(export_command)
app.command("verify")(verify_command)
app.command("compare")(compare_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """Options of tgfx itself."""


def main() -> None:
    """Entry point: an error of tgfx is a message on standard error and exit code 1, not a traceback."""
    try:
        app()
    except TgfxError as error:
        typer.echo(str(error), err=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
