"""``tvm-energy log``: check, describe, merge, prune and convert logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_energy.cli.guard import FAILED, Debug, Json, guarded, print_json, set_up_logging

NAME = "log"

app = typer.Typer(
    help="Check, describe, merge, prune and convert the logs of tuning runs, without hardware.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LOG_HELP = "Work directory of a tune run, or its database_energy_record.json; only read."
OneLog = Annotated[Path, typer.Argument(metavar="LOG", help=_LOG_HELP)]
Logs = Annotated[list[Path], typer.Argument(metavar="LOG...", help=_LOG_HELP)]
NewDirectory = Annotated[
    Path, typer.Option("--output", "-o", help="New work directory; nothing is overwritten.")
]
#: Problems printed one by one; a broken file may have millions.
_SHOWN = 100


@app.command("verify")
@guarded
def verify_command(
    logs: Logs,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Print every problem, not the first {_SHOWN} of a log.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every line; exit code 1 when a line is broken."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.logs.verify import Counts, verify
    from tvm_energy.report import printable

    set_up_logging()
    results, broken = [], False
    for log in logs:
        counts, problems = Counts(), []
        with working(f"checking {log}"):
            for number, problem in enumerate(verify(log, counts)):
                level = "warning" if problem.warning else "error"
                if not everything and number >= _SHOWN:
                    continue
                if as_json:
                    problems.append(
                        {
                            "file": str(problem.path),
                            "line": problem.line,
                            "reason": problem.reason,
                            "severity": level,
                        }
                    )
                else:
                    typer.echo(printable(f"{level}: {problem}"))
        broken |= counts.errors > 0
        found = {
            "log": str(log),
            "lines": dict(counts.lines),
            "errors": counts.errors,
            "warnings": counts.warnings,
            "problems": problems,
        }
        results.append(found)
        if not as_json:
            left_out = counts.errors + counts.warnings - _SHOWN
            if left_out > 0 and not everything:
                typer.echo(f"... and {left_out} more; --all prints every one")
            lines = ", ".join(f"{count} {kind}" for kind, count in counts.lines.items())
            typer.echo(
                f"{log}: {lines or 'no records'}; {_count(counts.errors, 'error')}, "
                f"{_count(counts.warnings, 'warning')}"
            )
    if as_json:
        print_json({"logs": results})
    if broken:
        raise typer.Exit(FAILED)


@app.command("stat")
@guarded
def stat_command(log: OneLog, as_json: Json = False, debug: Debug = False) -> None:
    """Show what a log holds: runs, how they measured, and lines by task."""
    from tvm_energy.cli.terminal import stdout_console, working
    from tvm_energy.logs.load import Log
    from tvm_energy.logs.stat import stat, to_json

    set_up_logging()
    with working(f"reading {log}"):
        result = stat(Log.of(log))
    if as_json:
        print_json(to_json(result))
        return
    from tvm_energy.cli.log_tables import render

    console = stdout_console()
    for part in render(result, console.width):
        console.print(part, highlight=False)


@app.command("merge")
@guarded
def merge_command(
    logs: Logs, output: NewDirectory, as_json: Json = False, debug: Debug = False
) -> None:
    """Merge logs of one device into a new work directory: every line once."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.logs.merge import merge
    from tvm_energy.report import printable

    set_up_logging()
    with working("merging"):
        result = merge(logs, output)
    if as_json:
        print_json(
            {
                "output": str(output),
                "runs": result.runs,
                "lines": result.lines,
                "duplicates": result.duplicates,
                "conflicts": [
                    {
                        "file": str(item.path),
                        "line": item.line,
                        "reason": item.reason,
                        "kept": item.warning,
                    }
                    for item in result.conflicts
                ],
                "notes": result.notes,
                "workloads": result.workloads,
                "tuning_records": result.tuning_records,
                "ansor_records": result.ansor_records,
            }
        )
        return
    for problem in result.conflicts:
        typer.echo(printable(f"conflict: {problem}"))
    for note in result.notes:
        typer.echo(printable(f"note: {note}"))
    typer.echo(
        f"{output}: {_count(result.lines, 'line')} of {_count(result.runs, 'run')}; "
        f"{_count(result.duplicates, 'duplicate')} left out, "
        f"{_count(len(result.conflicts), 'conflict')}; stock database: "
        f"{_count(result.workloads, 'workload')}, {_count(result.tuning_records, 'tuning record')}"
        f"{_of_ansor(result.ansor_records)}"
    )


@app.command("prune")
@guarded
def prune_command(
    log: OneLog,
    output: NewDirectory,
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="Keep the best for this objective, too."),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", "-k", help="Best kernels of each task kept per objective.")
    ] = 5,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Keep only the kernels that can still be chosen, in a new work directory."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.logs.prune import prune

    set_up_logging()
    with working(f"pruning {log}"):
        result = prune(log, output, objective=objective, keep=keep)
    if as_json:
        print_json({"output": str(output), **vars(result)})
        return
    typer.echo(
        f"{output}: {result.lines} of {_count(result.lines_before, 'line')}, "
        f"{_count(result.kernels, 'kernel')}, {_count(result.tuning_records, 'tuning record')}"
        f"{_of_ansor(result.ansor_records)}"
    )
    if result.without_record and (result.tuning_records or result.ansor_records):
        where = "Ansor's log" if result.ansor_records else "the stock database"
        typer.echo(f"{result.without_record} of these kernels are not in {where}")


@app.command("convert")
@guarded
def convert_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Work directory, record file, .csv, .parquet, or T4 results (.json); only read.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="New file: .csv, .parquet, .json for T4; any other name: a work directory.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option("--to", help="log, t4, csv or parquet; by default by the output's name."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device-name", help="Device of another tuner's T4 file, which lacks it."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert to and from Kernel Tuner's T4 results, CSV and Parquet."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.logs.convert import convert

    set_up_logging()
    with working(f"converting {source}"):
        count = convert(source, output, to=to, device=device)
    if as_json:
        print_json({"output": str(output), "records": count})
    else:
        typer.echo(f"{output}: {_count(count, 'record')}")


def _of_ansor(lines: int) -> str:
    return f", {_count(lines, 'line')} of Ansor's log" if lines else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
