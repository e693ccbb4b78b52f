"""``tvm-energy report``: the tables of a work directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_energy.cli.guard import Debug, Json, guarded, print_json, set_up_logging

NAME = "report"

WorkDir = Annotated[
    Path, typer.Argument(metavar="WORK_DIR", help="Work directory of a tune run; only read.")
]


@guarded
def command(work_dir: WorkDir, as_json: Json = False, debug: Debug = False) -> None:
    """Show what the runs in a work directory found."""
    set_up_logging()
    show(work_dir, None, as_json)


def show(work_dir: Path, objective: str | None, as_json: bool) -> None:
    """Print the report of a work directory under an objective (None: that of its last run)."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.replay import summarize

    with working(f"reading {work_dir}"):
        summary = summarize(work_dir, objective)
    if as_json:
        from tvm_energy.report import to_json

        print_json(to_json(summary))
    else:
        from tvm_energy.cli.terminal import stdout_console
        from tvm_energy.report import print_report

        print_report(summary, stdout_console(), str(work_dir))
