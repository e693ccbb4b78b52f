"""The command ``tvm-energy``: one file a command, results on stdout, everything else on stderr.

Exit codes: 0, 1 (failed), 2 (usage), 130 (interrupted). Modules that cost time are imported inside the
commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys

import typer

from tvm_energy.cli import (
    clocks,
    compare,
    compile,
    doctor,
    dvfs,
    export,
    log,
    measure,
    replay,
    report,
    tune,
    version,
    workloads,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="tvm-energy",
    help="Find GPU kernels that cost fewer joules, with Apache TVM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback, without local values
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
for module in (tune, measure, report, replay, compare, export, compile, workloads, doctor, version):
    app.command(module.NAME)(module.command)
app.callback()(version.options)
app.add_typer(clocks.app, name=clocks.NAME)
app.add_typer(dvfs.app, name=dvfs.NAME)
app.add_typer(log.app, name=log.NAME)


def main() -> None:
    """Entry point of ``tvm-energy``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # µ and ≈ on a terminal that has neither
    app()
