"""What a run found, worked out from its records alone: no device, no TVM, nothing written.

Because logs hold raw latency and energy, the same log can be summarised under any objective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvm_energy.clock_choice import (
    DEFAULT,
    ONE,
    TaskKernels,
    check_mode,
    choose_all,
    mode_of,
    points_by_workload,
)
from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.logs.load import Log, device_name, differences, filtered, note_task
from tvm_energy.objective import Objective, parse_objective
from tvm_energy.ranking import Choice, Kernel, kernels_by_workload
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    Record,
    TaskRecord,
)

#: Reasons longer than this are cut; the log holds the whole text.
_REASON_LENGTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSummary:
    """One kernel.

    Attributes:
        key: hash of its schedule trace; finds it in the database.
        latency_s: seconds a launch.
        energy_j, energy_stderr_j: measured joules a launch and their standard error; None where the
            energy was not measured.
        power_w: mean power of the same windows.
        measured: whether the energy was measured.
        clock_mhz: the core clock to be locked for it; None where it is left to the driver.
    """

    key: str
    latency_s: float
    energy_j: float | None
    energy_stderr_j: float | None
    power_w: float | None
    measured: bool
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSummary:
    """The outcome for one task.

    Attributes:
        name: of the task.
        workload: structural hash of its workload.
        weight: how often the network calls it.
        candidates: different kernels that were tried.
        failed: of these, how many never ran.
        energy_measurements: how many had their energy measured.
        predicted_only: how many ran and have only a predicted energy.
        finalists: how many were measured again at the end.
        fastest, best: least latency, and the choice of the objective; None without a valid kernel.
        ties: kernels as good as `best` within the error.
        saved_fraction: 1 - energy(best) / energy(fastest); None where an energy is missing.
        reason: why there is no `best`; None when there is one.
        errors: reason of failure -> how often.
        device_s: device seconds spent on energy measurements (virtual on a simulated device).
        at_default: where kernel and clock were chosen together, the kernel that would have been chosen at
            the clock that the driver takes; else None.
        clock_saved_fraction: 1 - energy(best) / energy(at_default).
        clocks: at how many locked clocks finalists were measured.
    """

    name: str
    workload: str
    weight: float
    candidates: int
    failed: int
    energy_measurements: int
    predicted_only: int
    finalists: int
    fastest: KernelSummary | None
    best: KernelSummary | None
    ties: tuple[KernelSummary, ...]
    saved_fraction: float | None
    reason: str | None
    errors: dict[str, int]
    device_s: float
    at_default: KernelSummary | None = None
    clock_saved_fraction: float | None = None
    clocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the tasks with a result, each counted `weight` times: one pass of the network.

    Energies are None when one of these tasks has no measured energy; what concerns the default clock is None
    unless kernels and clocks were chosen together.
    """

    tasks: int
    fastest_latency_s: float
    fastest_energy_j: float | None
    best_latency_s: float
    best_energy_j: float | None
    saved_fraction: float | None
    at_default_latency_s: float | None = None
    at_default_energy_j: float | None = None
    clock_saved_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What the runs in one work directory found.

    Attributes:
        simulated: no real joules were measured.
        device: its name.
        objective: the spec under which `best` was chosen.
        policy: spec of the last run.
        header: of the last run.
        runs: how many runs wrote to the log.
        set_aside: energies that earlier runs measured under another plan, and that are not used.
        tasks: in the order in which the log names them.
        totals: None when no task has a result.
        clock_choice: ``default`` (left to the driver), ``one`` or ``per-kernel``, see
            `tvm_energy.clock_choice`.
        clock_mhz: the clock to be locked for all tasks, under ``one``; None where it is left to the driver.
    """

    simulated: bool
    device: str
    objective: str
    policy: str
    header: Header
    runs: int
    set_aside: int
    tasks: tuple[TaskSummary, ...]
    totals: Totals | None
    clock_choice: str = DEFAULT
    clock_mhz: float | None = None


Source = Path | str | Log | Iterable[Record]


def summarize(
    source: Source, objective: str | None = None, clock_choice: str | None = None
) -> RunSummary:
    """Summarise a work directory, a record file, or records.

    Args:
        source: where the records are; only read, and line by line.
        objective: chooses the winners; by default the objective of the last run.
        clock_choice: ``default``, ``one`` or ``per-kernel``; by default as in the last run.

    Raises:
        ConfigurationError: there is no such folder, the objective or the choice of clocks is not known,
            or it needs measurements that the log does not have.
        WorkDirError: the folder has no records, cannot be read, or mixes devices.
        RecordFormatError: naming file and line.
    """
    return _summarize(Log.of(source), objective, clock_choice)


def summarize_together(sources: Sequence[Path | str], objective: str | None = None) -> RunSummary:
    """Rank the kernels of several work directories or files as those of one.

    Raises:
        WorkDirError: they differ in device, clocks or the way of measuring, so that their figures
            must not be ranked together.
        ConfigurationError, RecordFormatError: see `summarize`.
    """
    logs = [Log.of(source) for source in sources]
    for log in logs[1:]:
        reasons = differences(logs[0].header, log.header)
        if reasons:
            raise WorkDirError(
                f"{logs[0].name} and {log.name} cannot be ranked together, because they differ in "
                f"{', '.join(reasons)}; leave out --together to see them beside one another"
            )
    return _summarize(Log.together(logs), objective)


def _summarize(log: Log, objective: str | None, clock_choice: str | None = None) -> RunSummary:
    header = log.header
    chosen = parse_objective(objective or header.objective, max_power_w=max_power_w(header))
    left_out = Counter[str]()
    tasks: dict[str, TaskRecord] = {}
    tallies: dict[str, _Tally] = {}
    kernels = kernels_by_workload(_tallied(filtered(log.read(), header, left_out), tasks, tallies))
    _has_energy(kernels, chosen, header, log.name)
    points = points_by_workload(point for tally in tallies.values() for point in tally.points)
    mode = mode_of(header) if clock_choice is None else check_mode(clock_choice)
    if clock_choice not in (None, DEFAULT) and not points:
        raise ConfigurationError(
            f"{log.name} holds no measurements at locked clocks to choose from; tune with --clocks 5"
        )
    choices = choose_all(
        {
            workload: TaskKernels(
                kernels=kernels.get(workload, {}),
                points=points.get(workload, {}),
                weight=task.weight,
            )
            for workload, task in tasks.items()
        },
        chosen,
        mode,
    )
    summaries = tuple(
        _summarize_task(
            task,
            tallies.get(task.workload, _Tally()),
            kernels.get(task.workload, {}),
            choices.get(task.workload),
        )
        for task in tasks.values()
    )
    clocks = {choice.best.clock_mhz for choice in choices.values() if choice.at_default}
    return RunSummary(
        simulated=_is_simulated(header, kernels),
        device=device_name(header),
        objective=chosen.spec,
        policy=header.policy,
        header=header,
        runs=len(log.headers),
        set_aside=left_out.total(),
        tasks=summaries,
        totals=_totals(summaries),
        clock_choice=mode,
        clock_mhz=clocks.pop() if mode == ONE and clocks else None,
    )


def max_power_w(header: Header) -> float | None:
    """The device's power limit, where the log has it."""
    value = (header.meter or {}).get("max_power_w")
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _has_energy(
    kernels: dict[str, dict[str, Kernel]], objective: Objective, header: Header, where: str
) -> None:
    """An objective that needs energy cannot rank a log that has none."""
    if not objective.needs_energy or not any(kernels.values()):
        return
    if any(kernel.measured for task in kernels.values() for kernel in task.values()):
        return
    why = "the run had no meter" if header.meter is None else "every energy measurement failed"
    raise ConfigurationError(
        f"objective {objective.spec!r} needs energy, but {where} holds no measured energy ({why}). "
        "Use --objective latency, or tune on a device with a meter (see `tvm-energy doctor`)"
    )


@dataclass
class _Tally:
    """What is counted of one workload while its lines pass."""

    keys: set[str] = field(default_factory=set)
    finals: set[str] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    points: list[ClockRecord] = field(default_factory=list)
    device_s: float = 0.0


def _tallied(
    records: Iterable[Record], tasks: dict[str, TaskRecord], tallies: dict[str, _Tally]
) -> Iterator[Record]:
    """Hand records on, noting tasks (a later line of one replaces the earlier) and counts."""
    for record in records:
        note_task(record, tasks)
        if isinstance(record, (CandidateRecord, FinalRecord, ClockRecord)):
            workload = record.workload
            tally = tallies.get(workload)
            if tally is None:
                tally = tallies[workload] = _Tally()
            # A line without a key says that no candidate at all could be made.
            if record.key:
                tally.keys.add(record.key)
            if isinstance(record, FinalRecord):
                tally.finals.add(record.key)
            elif isinstance(record, ClockRecord):
                tally.points.append(record)
            elif record.error:
                tally.errors[_reason(record.error)] += 1
            if record.measured is not None:
                tally.device_s += record.measured.device_s
        yield record


def _summarize_task(
    task: TaskRecord, tally: _Tally, kernels: dict[str, Kernel], choice: Choice | None
) -> TaskSummary:
    fastest = _summarize_kernel(choice.fastest) if choice else None
    best = _summarize_kernel(choice.best) if choice else None
    at_default = _summarize_kernel(choice.at_default) if choice and choice.at_default else None
    return TaskSummary(
        name=task.task,
        workload=task.workload,
        weight=task.weight,
        candidates=len(tally.keys),
        failed=len(tally.keys - kernels.keys()),
        energy_measurements=sum(1 for kernel in kernels.values() if kernel.measured),
        predicted_only=sum(
            1
            for kernel in kernels.values()
            if not kernel.measured and kernel.predicted_energy_j is not None
        ),
        finalists=len(tally.finals),
        fastest=fastest,
        best=best,
        ties=tuple(map(_summarize_kernel, choice.ties)) if choice else (),
        saved_fraction=_saved(
            fastest.energy_j if fastest else None, best.energy_j if best else None
        ),
        reason=None if choice else _why_nothing(len(tally.keys), kernels, tally.errors),
        errors=dict(tally.errors.most_common()),
        device_s=tally.device_s,
        at_default=at_default,
        clock_saved_fraction=_saved(
            at_default.energy_j if at_default else None, best.energy_j if best else None
        ),
        clocks=len({point.clock_mhz for point in tally.points}),
    )


def _summarize_kernel(kernel: Kernel) -> KernelSummary:
    measured = kernel.measured
    return KernelSummary(
        key=kernel.key,
        latency_s=kernel.latency_s,
        energy_j=measured.energy_j if measured else None,
        energy_stderr_j=measured.stderr_j if measured else None,
        power_w=measured.power_w if measured else None,
        measured=measured is not None,
        clock_mhz=kernel.clock_mhz,
    )


def _why_nothing(tried: int, kernels: dict[str, Kernel], errors: Counter[str]) -> str:
    """Why a task has no winner, in one sentence."""
    common = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    if tried == 0:
        return next(
            iter(errors), "no candidate was tried; TVM's logs in the work directory may say why"
        )
    if not kernels:
        return f"none of {tried} candidates ran{common}"
    return f"{len(kernels)} of {tried} candidates ran, but no energy was measured{common}"


def _reason(error: str) -> str:
    """First line of an error text, cut to a length that fits a table."""
    lines = error.strip().splitlines()
    first = lines[0].strip() if lines else "unknown"
    return first if len(first) <= _REASON_LENGTH else first[: _REASON_LENGTH - 1] + "…"


def _is_simulated(header: Header, kernels: dict[str, dict[str, Kernel]]) -> bool:
    """True when any of the places that could say so does: a real number needs all of them."""
    return (
        bool(header.device.get("simulated"))
        or bool((header.meter or {}).get("simulated"))
        or any(
            kernel.measured is not None and kernel.measured.simulated
            for task in kernels.values()
            for kernel in task.values()
        )
    )


def _totals(tasks: Sequence[TaskSummary]) -> Totals | None:
    pairs = [(task.weight, task.fastest, task.best) for task in tasks if task.fastest and task.best]
    if not pairs:
        return None
    fastest = [(weight, kernel) for weight, kernel, _ in pairs]
    best = [(weight, kernel) for weight, _, kernel in pairs]
    fastest_j, best_j = _total_energy_j(fastest), _total_energy_j(best)
    # A task without measurements at locked clocks stays as it is.
    at_default = [
        (task.weight, task.at_default or task.best) for task in tasks if task.fastest and task.best
    ]
    joint = any(task.at_default for task in tasks)
    at_default_j = _total_energy_j(at_default) if joint else None
    return Totals(
        tasks=len(pairs),
        fastest_latency_s=math.fsum(weight * kernel.latency_s for weight, kernel in fastest),
        fastest_energy_j=fastest_j,
        best_latency_s=math.fsum(weight * kernel.latency_s for weight, kernel in best),
        best_energy_j=best_j,
        saved_fraction=_saved(fastest_j, best_j),
        at_default_latency_s=(
            math.fsum(weight * kernel.latency_s for weight, kernel in at_default) if joint else None
        ),
        at_default_energy_j=at_default_j,
        clock_saved_fraction=_saved(at_default_j, best_j),
    )


def _total_energy_j(kernels: Sequence[tuple[float, KernelSummary]]) -> float | None:
    energies = [(weight, kernel.energy_j) for weight, kernel in kernels]
    if any(energy_j is None for _, energy_j in energies):
        return None
    return math.fsum(weight * energy_j for weight, energy_j in energies if energy_j is not None)


def _saved(fastest_j: float | None, best_j: float | None) -> float | None:
    """Part of the energy that the choice saves; None without both energies."""
    if fastest_j is None or best_j is None or fastest_j == 0:
        return None
    return 1 - best_j / fastest_j
