"""The outcome of a run as Markdown, for a pull request."""

from __future__ import annotations

import html

from tvm_energy.clock_choice import DEFAULT
from tvm_energy.replay import KernelSummary, RunSummary
from tvm_energy.report import (
    clock,
    clock_notes,
    format_quantity,
    printable,
    shorten,
    simulated_banner,
)
from tvm_energy.report_facts import saving

_NOTHING = "–"
#: What Markdown would take for markup inside a line or a table's cell.
_SPECIAL = "\\`*_[]|~"
#: GitHub turns references, mentions and bare addresses into links; "#" comes first.
_LINKS = {" #": " &#35;", "@": "&#64;", "://": ":&#47;/", "www.": "www&#46;"}


def render_markdown(summary: RunSummary) -> str:
    """A heading, one table and a few sentences; nothing from the log can become markup."""
    lines = [f"### Energy on {_safe(summary.device)}", ""]
    if summary.simulated:
        lines += [f"> **{_safe(simulated_banner(summary.device))}**", ""]
    saved = saving(summary)
    if saved is not None:
        lines += [
            f"One pass of the network: **{100 * saved.fraction + 0.0:.1f} % ± {100 * saved.margin:.1f} less energy** "
            f"than with the fastest kernels, at {100 * saved.slowdown:+.1f} % time.",
            "",
        ]
    clocks = summary.clock_choice != DEFAULT
    lines += [
        "| kernel | calls | fastest: time | energy | chosen: time | energy | saved | measured |"
        + " clock | saved by clock |" * clocks,
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |" + " ---: | ---: |" * clocks,
    ]
    for task in summary.tasks:
        if task.fastest is None or task.best is None:
            continue
        cells = [
            _safe(shorten(printable(task.name), 60)),
            f"{task.weight:g}",
            *_cells(task.fastest),
            *_cells(task.best),
            ("≈ " if task.ties else "") + _percent(task.saved_fraction),
            f"{task.energy_measurements} of {task.candidates}",
            *((clock(task.best), _percent(task.clock_saved_fraction)) if clocks else ()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    totals = summary.totals
    if totals is not None:
        cells = [
            "**one pass of all**",
            "",
            format_quantity(totals.fastest_latency_s, "s"),
            _energy(totals.fastest_energy_j),
            format_quantity(totals.best_latency_s, "s"),
            _energy(totals.best_energy_j),
            _percent(totals.saved_fraction),
            "",
            *(("", _percent(totals.clock_saved_fraction)) if clocks else ()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Objective {_safe(summary.objective)}, policy {_safe(summary.policy)}."]
    lines += map(_safe, clock_notes(summary))
    if any(task.ties for task in summary.tasks):
        lines.append(
            "≈ other kernels are as good within the error; the fastest of these was chosen."
        )
    for task in summary.tasks:
        if task.reason is not None:
            lines += ["", f"No kernel for {_safe(task.name)}: {_safe(task.reason)}"]
    return "\n".join(lines) + "\n"


def _cells(kernel: KernelSummary) -> tuple[str, str]:
    return format_quantity(kernel.latency_s, "s"), _energy(kernel.energy_j)


def _energy(energy_j: float | None) -> str:
    return _NOTHING if energy_j is None else format_quantity(energy_j, "J")


def _percent(fraction: float | None) -> str:
    return _NOTHING if fraction is None else f"{100 * fraction + 0.0:.1f} %"


def _safe(text: str) -> str:
    escaped = "".join(
        f"\\{character}" if character in _SPECIAL else html.escape(character)
        for character in printable(text)
    )
    for mark, reference in _LINKS.items():
        escaped = escaped.replace(mark, reference)
    return escaped
