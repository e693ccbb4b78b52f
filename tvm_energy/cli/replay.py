"""``tvm-energy replay``: choose again among recorded kernels, under another objective."""

from __future__ import annotations

from tvm_energy.cli.guard import Debug, Json, guarded, set_up_logging
from tvm_energy.cli.report import Objective, WorkDir, show

NAME = "replay"


@guarded
def command(
    work_dir: WorkDir,
    objective: Objective = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rank a recorded run again under an objective, without hardware."""
    set_up_logging()
    show(work_dir, objective, as_json)
