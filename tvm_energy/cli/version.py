"""``tvm-energy version``."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_energy.cli.guard import Debug, Json, guarded, print_json
from tvm_energy.version import __version__

NAME = "version"


@guarded
def command(as_json: Json = False, debug: Debug = False) -> None:
    """Print the version of tvm-energy."""
    if as_json:
        print_json({"version": __version__})
    else:
        typer.echo(f"tvm-energy {__version__}")


def _show(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tvm-energy {__version__}")
        raise typer.Exit


def options(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """What can be asked without a command."""
