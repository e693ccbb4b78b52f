"""``tvm-energy replay``: choose again among recorded kernels, under another objective."""

from __future__ import annotations

from typing import Annotated

import typer

from tvm_energy.cli.guard import Debug, Json, guarded, set_up_logging
from tvm_energy.cli.report import WorkDir, show

NAME = "replay"


@guarded
def command(
    work_dir: WorkDir,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            "-o",
            help="latency, energy, edp, ed2p, energy:slack=0.05, weighted:eta=0.5; "
            "by default that of the last run.",
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rank a recorded run again under an objective, without hardware."""
    set_up_logging()
    show(work_dir, objective, as_json)
