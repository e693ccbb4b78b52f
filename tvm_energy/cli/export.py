"""``tvm-energy export``: the chosen kernels as a stock database that plain TVM deploys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_energy.cli.guard import (
    Debug,
    Json,
    guarded,
    print_json,
    say,
    set_up_logging,
    stdout_for_results,
)
from tvm_energy.cli.report import ClockChoice, Objective, WorkDir

NAME = "export"


@guarded
def command(
    work_dir: WorkDir,
    to: Annotated[
        Path,
        typer.Option(
            "--to", metavar="DIR", help="New folder for the database; for Ansor, a new file."
        ),
    ],
    objective: Objective = None,
    clock_choice: ClockChoice = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one chosen kernel per workload as a stock database, with a manifest.

    Plain TVM deploys it; tvm-energy need not be installed there. Of a directory of legacy Ansor a stock
    log is written, in which stock apply_best finds the choice.
    """
    set_up_logging()
    from tvm_energy.ansor_log import is_ansor_only
    from tvm_energy.report import format_quantity, printable, simulated_banner

    if is_ansor_only(work_dir):
        _export_ansor(work_dir, to, objective, clock_choice, force, as_json)
        return
    with stdout_for_results():
        from tvm_energy.meta_schedule.export import export

        manifest = export(
            work_dir, to, objective=objective, clock_choice=clock_choice, replace=force
        )
    for item in manifest["without_kernel"]:
        say(f"No kernel for {printable(item['task'])}: {printable(item['reason'] or '')}")
    if as_json:
        print_json(manifest | {"to": str(to)})
        return
    if manifest["simulated"]:
        typer.echo(simulated_banner(str(manifest["device"].get("uuid"))))
    kernels, totals = manifest["kernels"], manifest["totals"]
    what = "1 kernel" if len(kernels) == 1 else f"{len(kernels)} kernels"
    expected = f"{format_quantity(totals['best_latency_s'], 's')}"
    if totals["best_energy_j"] is not None:
        expected += f" and {format_quantity(totals['best_energy_j'], 'J')}"
    typer.echo(f"{what} in {printable(str(to))}, chosen by {manifest['objective']}")
    typer.echo(f"Expected for all calls together: {expected} (manifest.json has each kernel's)")
    clocks = {kernel["clock_mhz"] for kernel in kernels} - {None}
    if clocks:
        which = ", ".join(f"{mhz:g}" for mhz in sorted(clocks))
        typer.echo(
            f"Chosen for a locked core clock of {which} MHz; it is not locked by itself. At run time: "
            f"with tvm_energy.manifest.deployed_clock({str(to)!r}): ..."
        )
    typer.echo(f"In plain TVM: database = ms.database.JSONDatabase(work_dir={str(to)!r})")


def _export_ansor(
    work_dir: Path,
    to: Path,
    objective: str | None,
    clock_choice: str | None,
    force: bool,
    as_json: bool,
) -> None:
    from tvm_energy.ansor.logs import export_log
    from tvm_energy.errors import ConfigurationError
    from tvm_energy.replay import summarize
    from tvm_energy.report import printable, simulated_banner

    if clock_choice is not None:
        raise ConfigurationError(
            f"{work_dir} is a run of legacy Ansor, which chooses no clocks; leave --clock-choice out"
        )
    kernels = export_log(work_dir, to, objective, replace=force)
    summary = summarize(work_dir, objective)
    if as_json:
        print_json(
            {
                "to": str(to),
                "kernels": kernels,
                "objective": summary.objective,
                "simulated": summary.simulated,
            }
        )
        return
    if summary.simulated:
        typer.echo(simulated_banner(summary.device))
    what = "1 kernel" if kernels == 1 else f"{kernels} kernels"
    typer.echo(f"{what} in {printable(str(to))}, chosen by {summary.objective}")
    typer.echo(f"In stock Ansor: schedule, tensors = task.apply_best({str(to)!r})")
