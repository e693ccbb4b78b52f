"""Tables of ``log stat`` and of policy replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tvm_energy.logs.stat import LogStat
from tvm_energy.policy_replay import PolicyReplay
from tvm_energy.report import format_quantity, printable, shorten, simulated_banner


def render(result: LogStat, width: int) -> Iterator[RenderableType]:
    """Tables for a terminal of a width."""
    if result.simulated:
        yield Text(simulated_banner(result.device), style="bold yellow")
    runs = _table("run", "started (UTC)", "objective", "policy", "tried", "finals", "device time")
    for number, run in enumerate(result.runs, start=1):
        runs.add_row(
            str(number),
            _time(run.header.created),
            *(Text(printable(text)) for text in (run.header.objective, run.header.policy)),
            str(run.lines["candidate"]),
            str(run.lines["final"]),
            f"{run.device_s:.3g} s",
        )
    yield runs
    for number, run in enumerate(result.runs, start=1):
        if run.differs:
            reasons = printable(", ".join(run.differs))
            yield Text(f"Run {number} is not ranked with the last one: other {reasons}")
    tasks = _table("task", "tried", "ran", "measured", "predicted", "finals", "time", "energy")
    for task in result.tasks.values():
        tasks.add_row(
            Text(shorten(printable(task.name), max(16, width - 92))),
            *map(str, (task.candidates, task.ran, task.measured, task.predicted, task.finals)),
            _span(task.latency_s, "s"),
            _span(task.energy_j, "J"),
        )
    yield tasks


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _span(limits: tuple[float, float] | None, unit: str) -> str:
    if limits is None:
        return "–"
    least, greatest = (format_quantity(value, unit) for value in limits)
    return least if least == greatest else f"{least} to {greatest}"


def _time(created: float) -> str:
    """Unix time as date and time (UTC); empty where there is no such time."""
    try:
        return datetime.fromtimestamp(created, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return ""


def render_steps(replay: PolicyReplay) -> Iterator[RenderableType]:
    """Round by round."""
    table = _table(
        "task", "round", "tried", "gated", "measured", "k", "SNR", "fastest", "best cost"
    )
    for step in replay.steps:
        record = step.record
        fraction = record.policy_state.get("fraction")
        table.add_row(
            Text(shorten(printable(step.task), 40)),
            str(record.round + 1),
            str(record.candidates),
            str(record.gated),
            f"{record.measured}" + (f" (+{step.missing} missing)" if step.missing else ""),
            f"{fraction:.2f}" if isinstance(fraction, float) else "–",
            "–" if record.snr_db is None else f"{record.snr_db:.1f} dB",
            "–" if record.best_latency_s is None else format_quantity(record.best_latency_s, "s"),
            "–" if record.best_cost is None else f"{record.best_cost:.4g}",
        )
    yield table
    for step in replay.steps:
        for difference in step.differences:
            yield Text(
                printable(f"{step.task}, round {step.record.round + 1} differs: {difference}")
            )


def render_policies(replays: Sequence[PolicyReplay]) -> Iterator[RenderableType]:
    """Policies beside one another."""
    table = _table(
        "policy", "measured", "of gated", "missing", "device time", "worst regret", "mean"
    )
    for replay in replays:
        regrets = [task.regret for task in replay.tasks if task.regret is not None]
        table.add_row(
            Text(printable(replay.policy)),
            str(replay.measured),
            f"{replay.measured / replay.gated:.0%}" if replay.gated else "–",
            str(replay.missing),
            f"{replay.device_s:.4g} s",
            f"{max(regrets):+.2%}" if regrets else "–",
            f"{sum(regrets) / len(regrets):+.2%}" if regrets else "–",
        )
    yield table
