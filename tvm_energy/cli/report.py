"""``tvm-energy report``: the tables of a work directory."""

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
from tvm_energy.errors import ConfigurationError, TvmEnergyError

NAME = "report"

WorkDir = Annotated[
    Path, typer.Argument(metavar="WORK_DIR", help="Work directory of a tune run; only read.")
]

Objective = Annotated[
    str | None,
    typer.Option(
        "--objective",
        "-o",
        help="latency, energy, edp, ed2p, energy:slack=0.05, weighted:eta=0.5; "
        "by default that of the last run.",
    ),
]

ClockChoice = Annotated[
    str | None,
    typer.Option(
        "--clock-choice",
        help="Of a run with --clocks: default (leave the clock to the driver), one (for all kernels) or "
        "per-kernel; by default as in the last run.",
    ),
]


@guarded
def command(
    work_dir: WorkDir,
    objective: Objective = None,
    clock_choice: ClockChoice = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one self-contained page instead."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown for a pull request instead.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what the runs in a work directory found."""
    set_up_logging()
    if sum((html is not None, markdown, as_json)) > 1:
        raise ConfigurationError("give only one of --html, --markdown and --json")
    if html is not None:
        write_html(work_dir, objective, html, clock_choice)
    elif markdown:
        from tvm_energy.replay import summarize
        from tvm_energy.report_markdown import render_markdown

        typer.echo(render_markdown(summarize(work_dir, objective, clock_choice)), nl=False)
    else:
        show(work_dir, objective, as_json, clock_choice)


def write_html(
    work_dir: Path, objective: str | None, path: Path, clock_choice: str | None = None
) -> None:
    """Write the page of a work directory."""
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a folder; give the name of a file, such as report.html"
        )
    from tvm_energy.logs.load import record_file
    from tvm_energy.records import read_records
    from tvm_energy.replay import summarize
    from tvm_energy.report_html import render_html

    # One reading for both, so that a run that goes on meanwhile cannot make them differ.
    records = list(read_records(record_file(work_dir)))
    summary = summarize(records, objective, clock_choice)
    keys = {task.workload: task.best.key for task in summary.tasks if task.best}
    schedules, reason = _schedules(work_dir, keys)
    page = render_html(summary, records, schedules=schedules, no_schedules=reason)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
    say(f"Written: {path}")


def _schedules(work_dir: Path, keys: dict[str, str]) -> tuple[dict[str, str], str | None]:
    """Sources of kernels, or why there are none: the figures are worth a page without them."""
    if not keys or not work_dir.is_dir():
        return {}, "the stock files of the run are not beside its log"
    try:
        with stdout_for_results():
            from tvm_energy.meta_schedule.export import schedule_texts

            return schedule_texts(work_dir, keys), None
    except TvmEnergyError as exc:
        return {}, str(exc)


def show(
    work_dir: Path, objective: str | None, as_json: bool, clock_choice: str | None = None
) -> None:
    """Print the report of a work directory; None for objective and clocks as in its last run."""
    from tvm_energy.cli.terminal import working
    from tvm_energy.replay import summarize

    with working(f"reading {work_dir}"):
        summary = summarize(work_dir, objective, clock_choice)
    if as_json:
        from tvm_energy.report import to_json

        print_json(to_json(summary))
    else:
        from tvm_energy.cli.terminal import stdout_console
        from tvm_energy.report import print_report

        print_report(summary, stdout_console(), str(work_dir))
