"""Two runs beside one another: ratios of energy and time for each kernel, and whether they mean anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.logs.load import record_file
from tvm_energy.ranking import TIE_SIGMA
from tvm_energy.records import CandidateRecord, FinalRecord, Record, read_records
from tvm_energy.replay import KernelSummary, RunSummary, TaskSummary, summarize

BETTER, WORSE, SAME, UNKNOWN = "less", "more", "no difference", "not known"

#: Kernels timed twice that are needed to tell how well timings repeat.
_LEAST_PAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A quotient B / A and its interval of `TIE_SIGMA` standard errors (about 95 %).

    Attributes:
        value: B / A; below 1, B is the better one.
        low, high: the interval; None where the errors are not known.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """``less`` or ``more`` when the interval lies on one side of 1, else ``no difference``."""
        if self.low is None or self.high is None:
            return UNKNOWN
        return BETTER if self.high < 1 else WORSE if self.low > 1 else SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One workload that both runs tuned.

    Attributes:
        name: in A.
        workload: structural hash.
        weight: calls in one pass, as in A.
        a, b: the chosen kernels.
        energy: None where one of the energies was not measured, or must not be compared.
        latency: of times; its interval comes from how well each log's timings repeat.
        same_kernel: both chose the same schedule.
    """

    name: str
    workload: str
    weight: float
    a: KernelSummary
    b: KernelSummary
    energy: Ratio | None
    latency: Ratio
    same_kernel: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        a, b: both summaries, under one objective.
        tasks: what both have.
        only_a, only_b: names of tasks with a result in one run only.
        energy, latency: ratios for one pass over the tasks in `tasks`, with A's weights.
        notes: differences of the circumstances that the reader must know.
    """

    a: RunSummary
    b: RunSummary
    tasks: tuple[TaskComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    energy: Ratio | None
    latency: Ratio | None
    notes: tuple[str, ...]


def compare(
    a: Path | str, b: Path | str, *, objective: str | None = None, across_devices: bool = False
) -> Comparison:
    """Compare the chosen kernels of two runs.

    Args:
        a, b: work directories or record files; only read.
        objective: chooses the kernels in both; by default A's own.
        across_devices: allow runs of different devices. Their ratios then compare devices as much as
            kernels, and say so.

    Raises:
        ConfigurationError: different devices without `across_devices`; a simulated and a real one; or
            energies of different scope.
        WorkDirError, RecordFormatError: a log cannot be read.
    """
    records_a, records_b = _records(a), _records(b)
    first = summarize(records_a, objective)
    second = summarize(records_b, first.objective)
    error_a, error_b = timing_error(records_a), timing_error(records_b)
    error = None if error_a is None or error_b is None else math.hypot(error_a, error_b)
    notes = _circumstances(first, second, across_devices)
    ours = {task.workload: task for task in first.tasks if task.best}
    theirs = {task.workload: task for task in second.tasks if task.best}
    tasks = tuple(
        _compare_task(task, theirs[workload], error)
        for workload, task in ours.items()
        if workload in theirs
    )
    if not tasks:
        notes = (*notes, "the runs have no kernel in common: they tuned different workloads")
    return Comparison(
        a=first,
        b=second,
        tasks=tasks,
        only_a=tuple(task.name for workload, task in ours.items() if workload not in theirs),
        only_b=tuple(task.name for workload, task in theirs.items() if workload not in ours),
        energy=_total_energy(tasks),
        latency=_total_latency(tasks, error),
        notes=notes,
    )


def timing_error(records: Iterable[Record]) -> float | None:
    """Relative standard error of one timing, from kernels that were timed more than once.

    A kernel whose energy was measured was timed twice, in the search and in the measuring windows. The
    two differ by sqrt(2) errors; what the two methods differ by throughout is counted as error too, so
    this is an upper bound. None with fewer than `_LEAST_PAIRS` such kernels.
    """
    latency_s: dict[tuple[str, str], float] = {}
    squares = []
    for record in records:
        if isinstance(record, (CandidateRecord, FinalRecord)):
            name = (record.workload, record.key)
            if isinstance(record, CandidateRecord) and record.latency_s is not None:
                latency_s.setdefault(name, record.latency_s)
            if record.measured is not None and name in latency_s:
                squares.append(math.log(record.measured.latency_s / latency_s[name]) ** 2)
    if len(squares) < _LEAST_PAIRS:
        return None
    return math.sqrt(math.fsum(squares) / len(squares) / 2)


def _records(source: Path | str) -> list[Record]:
    path = record_file(Path(source))
    try:
        return list(read_records(path))
    except OSError as exc:
        raise WorkDirError(f"cannot read {path}: {exc.strerror}") from exc


def _compare_task(ours: TaskSummary, theirs: TaskSummary, timing: float | None) -> TaskComparison:
    a, b = ours.best, theirs.best
    assert a is not None
    assert b is not None
    return TaskComparison(
        name=ours.name,
        workload=ours.workload,
        weight=ours.weight,
        a=a,
        b=b,
        energy=_energy_ratio([(1.0, a)], [(1.0, b)]),
        latency=_with_interval(b.latency_s / a.latency_s, timing),
        same_kernel=a.key == b.key,
    )


def _energy_ratio(
    a: Sequence[tuple[float, KernelSummary]], b: Sequence[tuple[float, KernelSummary]]
) -> Ratio | None:
    """B / A of weighted sums.

    The interval is taken in the logarithm, where it is symmetric and never reaches zero:
    exp(ln B/A ± z sqrt((s_A/A)^2 + (s_B/B)^2)).
    """
    sums = []
    for side in (a, b):
        if any(kernel.energy_j is None for _, kernel in side):
            return None
        total = math.fsum(weight * (kernel.energy_j or 0.0) for weight, kernel in side)
        error = math.hypot(*(weight * (kernel.energy_stderr_j or 0.0) for weight, kernel in side))
        if not total > 0:
            return None
        sums.append((total, error / total))
    (total_a, error_a), (total_b, error_b) = sums
    return _with_interval(total_b / total_a, math.hypot(error_a, error_b))


def _with_interval(value: float, relative_error: float | None) -> Ratio:
    if relative_error is None:
        return Ratio(value=value)
    # More than e^50 in either direction says nothing any more, and would overflow.
    width = min(TIE_SIGMA * relative_error, 50.0)
    return Ratio(value=value, low=value * math.exp(-width), high=value * math.exp(width))


def _total_energy(tasks: Sequence[TaskComparison]) -> Ratio | None:
    if not tasks:
        return None
    return _energy_ratio([(t.weight, t.a) for t in tasks], [(t.weight, t.b) for t in tasks])


def _total_latency(tasks: Sequence[TaskComparison], timing: float | None) -> Ratio | None:
    total_a = math.fsum(task.weight * task.a.latency_s for task in tasks)
    total_b = math.fsum(task.weight * task.b.latency_s for task in tasks)
    # Timing errors of one log may share a cause, so they do not average out over the tasks here.
    return _with_interval(total_b / total_a, timing) if total_a > 0 else None


def _circumstances(a: RunSummary, b: RunSummary, across_devices: bool) -> tuple[str, ...]:
    """What differs between the runs apart from their kernels."""
    if a.simulated != b.simulated:
        simulated, real = (a, b) if a.simulated else (b, a)
        raise ConfigurationError(
            f"{simulated.device} is simulated and {real.device} is not: their joules cannot be compared"
        )
    notes = []
    device_a, device_b = _device(a), _device(b)
    if device_a != device_b:
        if not across_devices:
            raise ConfigurationError(
                f"the runs are of different devices, {a.device} ({device_a}) and {b.device} "
                f"({device_b}); give --across-devices to compare them all the same"
            )
        notes.append(
            f"the devices differ: {a.device} and {b.device}; sensors of two boards may differ by "
            "several per cent, which is not in the intervals"
        )
    for name in ("scope", "method", "meter"):
        mine, other = (_meter(run).get(name) for run in (a, b))
        if mine != other and mine is not None and other is not None:
            if name == "scope":
                raise ConfigurationError(
                    f"the energies have different scopes, {mine} and {other}: they cannot be compared"
                )
            notes.append(f"the energies were measured with another {name}: {mine} and {other}")
    notes += _differences("measuring plan", a.header.plan, b.header.plan)
    notes += _differences("version", a.header.versions, b.header.versions)
    if a.header.device.get("driver") != b.header.device.get("driver"):
        notes.append(
            f"the drivers differ: {a.header.device.get('driver')} and {b.header.device.get('driver')}"
        )
    return tuple(notes)


def _differences(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} {name}: {a.get(name)} and {b.get(name)}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _device(run: RunSummary) -> str:
    return str(run.header.device.get("uuid"))


def _meter(run: RunSummary) -> Mapping[str, Any]:
    return run.header.meter or {}
