"""``tvm-energy compare``: two runs beside one another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_energy.cli.guard import Debug, Json, guarded, print_json, set_up_logging
from tvm_energy.cli.report import Objective

if TYPE_CHECKING:
    from tvm_energy.compare import Comparison, Ratio

NAME = "compare"

_Run = "Work directory of a tune run, or its record file; only read."


@guarded
def command(
    a: Annotated[Path, typer.Argument(metavar="A", help=_Run)],
    b: Annotated[Path, typer.Argument(metavar="B", help=_Run)],
    objective: Objective = None,
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Compare runs of different devices too.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the chosen kernels of two runs: B / A, and whether that is beyond the noise."""
    set_up_logging()
    from tvm_energy.compare import compare

    result = compare(a, b, objective=objective, across_devices=across_devices)
    if as_json:
        print_json(to_json(result))
    else:
        _print(result)


def to_json(result: Comparison) -> dict[str, Any]:
    """The comparison as JSON values; ratios are B / A."""
    return {
        "objective": result.a.objective,
        "simulated": result.a.simulated,
        "devices": [result.a.device, result.b.device],
        "notes": list(result.notes),
        "only_a": list(result.only_a),
        "only_b": list(result.only_b),
        "tasks": [
            {
                "name": task.name,
                "workload": task.workload,
                "weight": task.weight,
                "a": dataclasses.asdict(task.a),
                "b": dataclasses.asdict(task.b),
                "same_kernel": task.same_kernel,
                "energy": _ratio_json(task.energy),
                "latency": _ratio_json(task.latency),
            }
            for task in result.tasks
        ],
        "totals": {"energy": _ratio_json(result.energy), "latency": _ratio_json(result.latency)},
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, Any] | None:
    return None if ratio is None else dataclasses.asdict(ratio) | {"verdict": ratio.verdict}


def _print(result: Comparison) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tvm_energy.cli.terminal import stdout_console
    from tvm_energy.report import format_quantity, printable, shorten, simulated_banner

    console = stdout_console()
    if result.a.simulated:
        console.print(Text(simulated_banner(result.a.device), style="bold yellow"))
    console.print(
        Text(printable(f"Kernels chosen by {result.a.objective}; below 1, B is the better one.")),
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kernel (calls)")
    for heading in (
        "A: energy",
        "B: energy",
        "energy\nB/A",
        "interval",
        "B takes",
        "time\nB/A",
        "interval",
        "B takes",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for task in result.tasks:
        calls = f" ({task.weight:g}×)" if task.weight != 1 else ""
        table.add_row(
            Text(shorten(printable(task.name), 28) + calls, no_wrap=True),
            *(
                "–" if k.energy_j is None else format_quantity(k.energy_j, "J")
                for k in (task.a, task.b)
            ),
            *_cells(task.energy),
            *_cells(task.latency),
        )
    if len(result.tasks) > 1 and result.latency is not None:
        table.add_section()
        table.add_row(
            "all calls", "", "", *_cells(result.energy), *_cells(result.latency), style="bold"
        )
    if result.tasks:
        console.print(table, highlight=False)
        console.print(
            "Intervals hold two standard errors of both runs; where 1 lies inside, no difference is shown. "
            "Those of times come from kernels that were timed more than once.",
            highlight=False,
        )
    for which, names in (("A", result.only_a), ("B", result.only_b)):
        if names:
            console.print(Text(printable(f"Only in {which}: {', '.join(names)}")), highlight=False)
    for note in result.notes:
        console.print(Text(printable(f"Note: {note}")), highlight=False)


def _cells(ratio: Ratio | None) -> tuple[str, str, str]:
    if ratio is None:
        return "–", "–", "–"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}", "–", ratio.verdict
    return f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", ratio.verdict
