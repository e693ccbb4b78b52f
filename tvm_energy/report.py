"""A run's outcome for people (tables) and for programs (JSON).

Nothing is measured or decided here; `tvm_energy.replay.summarize` supplies the facts.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tvm_energy.clock_choice import DEFAULT, ONE
from tvm_energy.replay import KernelSummary, RunSummary, TaskSummary, Totals

_OUTCOME = ("fastest:\ntime", "\nenergy", "chosen:\ntime", "\nenergy", "energy\nsaved")
_CLOCK = ("chosen:\nclock", "saved by\nclock")
_EFFORT = ("kernels\ntried", "energy\nmeasured", "only\npredicted")
#: Characters that these columns need; the name gets the rest of the line, within limits, and at least the last
#: of these where several groups of columns share a table.
_OUTCOME_WIDTH = 53
_CLOCK_WIDTH = 21
_EFFORT_WIDTH = 32
_NAME_WIDTH = (16, 44)
_LEAST_NAME = 24
_TIE_MARK = "≈"
_NOTHING = "–"


def print_report(summary: RunSummary, console: Console, where: str | None = None) -> None:
    """Print all tables and notes.

    Args:
        summary: what to report.
        console: where to print; its width decides how much of long names is shown.
        where: the work directory, named at the end.
    """
    for part in render(summary, console.width):
        console.print(part, highlight=False)
    if where is None:
        return
    for line in (
        f"Results are in {where}",
        f"Rank them again with: tvm-energy replay {shlex.quote(where)} --objective edp",
    ):
        # Not wrapped, so that it can be copied.
        console.print(Text(printable(line)), highlight=False, soft_wrap=True)


def render(summary: RunSummary, width: int) -> Iterator[RenderableType]:
    """The parts of the report, from top to bottom."""
    if summary.simulated:
        yield Text(simulated_banner(summary.device), style="bold yellow")
    yield Text(
        printable(
            f"Device {summary.device}, objective {summary.objective}, policy {summary.policy}"
        )
    )
    if any(task.best for task in summary.tasks):
        yield from _tables(summary, width)
    yield from map(Text, _notes(summary))
    yield from map(Text, _failures(summary))


def simulated_banner(device: str) -> str:
    """The line that stands above every number of a simulated device."""
    return f"SIMULATED DEVICE {printable(device)}: no real joules were measured"


def to_json(summary: RunSummary) -> dict[str, Any]:
    """The report as JSON values; units are in the names."""
    return {
        "simulated": summary.simulated,
        "device": summary.device,
        "objective": summary.objective,
        "policy": summary.policy,
        "runs": summary.runs,
        "set_aside": summary.set_aside,
        "clock_choice": summary.clock_choice,
        "clock_mhz": summary.clock_mhz,
        "tasks": [_task_json(task) for task in summary.tasks],
        "totals": None if summary.totals is None else _totals_json(summary.totals),
    }


def format_quantity(value: float, unit: str) -> str:
    """A value with three digits and a prefix that fits: ``1.23e-5, "J"`` -> ``12.3 µJ``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    rounded = float(f"{value:.2e}")  # first, so that 999.9 µJ becomes 1 mJ
    exponent = math.floor(math.log10(abs(rounded)) / 3) * 3
    exponent = min(max(exponent, min(_PREFIXES)), 0 if unit == "s" else max(_PREFIXES))
    scaled = rounded / 10.0**exponent
    digits = 2 - math.floor(math.log10(abs(scaled)))
    return f"{scaled:.{max(digits, 0)}f} {_PREFIXES[exponent]}{unit}"


_PREFIXES = {-15: "f", -12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G"}


def shorten(name: str, width: int) -> str:
    """Cut the middle out of a long name; the ends of task names tell them apart."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"


def printable(text: str) -> str:
    """Text from a log without what could steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _tables(summary: RunSummary, width: int) -> Iterator[Table]:
    """One table where the width allows it, else several below one another."""
    groups = [(_OUTCOME, _OUTCOME_WIDTH), (_EFFORT, _EFFORT_WIDTH)]
    if summary.clock_choice != DEFAULT:
        groups.insert(1, (_CLOCK, _CLOCK_WIDTH))
    tables: list[tuple[list[str], int]] = []
    for headings, taken in groups:
        if tables and tables[-1][1] + taken + _LEAST_NAME <= width:
            before, used = tables.pop()
            tables.append(([*before, *headings], used + taken))
        else:
            tables.append(([*headings], taken))
    rows, start = _rows(summary), 0
    for names, taken in tables:
        yield _table(rows, width - taken, names, start)
        start += len(names)


def _table(rows: list[_Row], name_width: int, headings: Sequence[str], start: int) -> Table:
    """A table of the cells from ``start`` on, as many as there are headings."""
    name_width = min(max(name_width, _NAME_WIDTH[0]), _NAME_WIDTH[1])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("kernel\n(calls)", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.total:
            table.add_section()
        name = shorten(printable(row.name), name_width - len(row.calls)) + row.calls
        table.add_row(
            Text(name),  # as it is: a name may hold what rich would take for markup
            *row.cells[start : start + len(headings)],
            style="bold" if row.total else None,
        )
    return table


@dataclass(frozen=True)
class _Row:
    name: str
    calls: str
    cells: tuple[str, ...]
    total: bool = False


def _rows(summary: RunSummary) -> list[_Row]:
    clocks = summary.clock_choice != DEFAULT
    rows = [
        _task_row(task, task.fastest, task.best, clocks)
        for task in summary.tasks
        if task.fastest and task.best
    ]
    totals = summary.totals
    if totals is not None and (totals.tasks > 1 or any(task.weight != 1 for task in summary.tasks)):
        rows.append(_totals_row(summary, totals))
    return rows


def _task_row(task: TaskSummary, fastest: KernelSummary, best: KernelSummary, clocks: bool) -> _Row:
    return _Row(
        name=task.name,
        calls=f" ({task.weight:g}×)" if task.weight != 1 else "",
        cells=(
            format_quantity(fastest.latency_s, "s"),
            _energy(fastest.energy_j),
            format_quantity(best.latency_s, "s"),
            f"{_TIE_MARK} " * bool(task.ties) + _energy(best.energy_j),
            _percent(task.saved_fraction),
            *((clock(best), _percent(task.clock_saved_fraction)) if clocks else ()),
            str(task.candidates),
            str(task.energy_measurements),
            str(task.predicted_only),
        ),
    )


def _totals_row(summary: RunSummary, totals: Totals) -> _Row:
    counted = [task for task in summary.tasks if task.best]
    return _Row(
        name="all calls",
        calls="",
        total=True,
        cells=(
            format_quantity(totals.fastest_latency_s, "s"),
            _energy(totals.fastest_energy_j),
            format_quantity(totals.best_latency_s, "s"),
            _energy(totals.best_energy_j),
            _percent(totals.saved_fraction),
            *(
                ("", _percent(totals.clock_saved_fraction))
                if summary.clock_choice != DEFAULT
                else ()
            ),
            str(sum(task.candidates for task in counted)),
            str(sum(task.energy_measurements for task in counted)),
            str(sum(task.predicted_only for task in counted)),
        ),
    )


def clock(kernel: KernelSummary) -> str:
    """The clock to be locked for a kernel."""
    return "default" if kernel.clock_mhz is None else f"{kernel.clock_mhz:g} MHz"


def clock_notes(summary: RunSummary) -> Iterator[str]:
    """What was decided about the clock, and what that saves; nothing where it was left to the driver."""
    totals = summary.totals
    if summary.clock_choice == DEFAULT or totals is None:
        return
    if totals.at_default_energy_j is None or totals.at_default_latency_s is None:
        yield "No finalist was measured at a locked clock, so that the clock is left to the driver."
        return
    if summary.clock_choice == ONE:
        what = (
            "The clock is left to the driver: no measured clock costs less"
            if summary.clock_mhz is None
            else f"Kernels and clock were chosen together: lock {summary.clock_mhz:g} MHz"
        )
    else:
        what = "Kernels and clocks were chosen together, a clock for each kernel"
    slower = totals.best_latency_s / totals.at_default_latency_s - 1
    yield (
        f"{what}. Against what would be chosen at the default clock: "
        f"{_percent(totals.clock_saved_fraction)} less energy, {100 * slower:+.1f} % time."
    )
    if summary.clock_choice != ONE:
        yield "What it costs to change the clock between kernels is not counted."
    without = sum(1 for task in summary.tasks if task.best and task.at_default is None)
    if without:
        yield f"{without} of the kernels were not measured at locked clocks."


def _energy(energy_j: float | None) -> str:
    return _NOTHING if energy_j is None else format_quantity(energy_j, "J")


def _percent(fraction: float | None) -> str:
    if fraction is None:
        return _NOTHING
    return f"{100 * fraction + 0.0:.1f} %"


def _notes(summary: RunSummary) -> Iterator[str]:
    """How to read the table, and the figures that do not fit in it."""
    tasks = [task for task in summary.tasks if task.best]
    if not tasks:
        return
    yield (
        "Time and energy are those of one launch; “fastest” is the kernel of least time, “chosen” the "
        f"one that {summary.objective} chooses."
    )
    yield from clock_notes(summary)
    errors = [
        kernel.energy_stderr_j / kernel.energy_j
        for task in tasks
        for kernel in (task.fastest, task.best)
        if kernel and kernel.energy_j and kernel.energy_stderr_j is not None
    ]
    if errors:
        yield f"Energies are measured; the largest standard error among them is {max(errors):.1%}."
    else:
        yield "No energy was measured: time alone was compared."
    time_only = sum(
        task.candidates - task.failed - task.energy_measurements - task.predicted_only
        for task in tasks
    )
    if errors and time_only:
        kernels = "1 kernel was" if time_only == 1 else f"{time_only} kernels were"
        yield f"{kernels} tried for time alone: too slow for the energy to matter."
    if any(task.ties for task in tasks):
        yield (
            f"{_TIE_MARK} other kernels are as good within the error of the measurements; "
            "the fastest of these was chosen."
        )
    if summary.set_aside:
        yield (
            "Not used, because earlier runs measured in another way (--window-s or another setting "
            f"differs): {summary.set_aside} energies."
        )
    device_s = math.fsum(task.device_s for task in tasks)
    if device_s:
        kind = "virtual device time" if summary.simulated else "device time"
        yield f"Measuring energy took {_duration(device_s)} of {kind}."


def _failures(summary: RunSummary) -> Iterator[str]:
    """Tasks without a result, and how many candidates failed in the others."""
    for task in summary.tasks:
        if task.reason is not None:
            yield f"No kernel for {printable(task.name)}: {printable(task.reason)}"
    if summary.totals is not None and summary.totals.tasks < len(summary.tasks):
        yield "What is summed over all calls leaves these out."
    failed = sum(task.failed for task in summary.tasks if task.best)
    if failed:
        tried = sum(task.candidates for task in summary.tasks if task.best)
        yield f"{failed} of {tried} candidates failed; --json lists the reasons."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, _ = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _task_json(task: TaskSummary) -> dict[str, Any]:
    return {
        "name": task.name,
        "workload": task.workload,
        "weight": task.weight,
        "candidates": task.candidates,
        "failed": task.failed,
        "energy_measurements": task.energy_measurements,
        "predicted_only": task.predicted_only,
        "finalists": task.finalists,
        "fastest": _kernel_json(task.fastest),
        "best": _kernel_json(task.best),
        "ties": [_kernel_json(kernel) for kernel in task.ties],
        "saved_fraction": task.saved_fraction,
        "reason": task.reason,
        "errors": task.errors,
        "device_s": task.device_s,
        "at_default": _kernel_json(task.at_default),
        "clock_saved_fraction": task.clock_saved_fraction,
        "clocks": task.clocks,
    }


def _kernel_json(kernel: KernelSummary | None) -> dict[str, Any] | None:
    return None if kernel is None else dataclasses.asdict(kernel)


def _totals_json(totals: Totals) -> dict[str, Any]:
    return dataclasses.asdict(totals)
