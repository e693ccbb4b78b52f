"""What a log holds, in figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tvm_energy.logs.load import Log, device_name, differences
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    RoundRecord,
    TaskRecord,
)


@dataclass
class RunStat:
    """One run.

    Attributes:
        header: its first line.
        differs: why its figures are not ranked with those of the last run; empty when they are.
        lines: by kind.
        device_s: device time of its energy measurements.
        seconds: wall time of the parts of its rounds.
    """

    header: Header
    differs: list[str]
    lines: Counter[str] = field(default_factory=Counter)
    device_s: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)


@dataclass
class TaskStat:
    """One task, over all runs.

    Attributes:
        name: of the task.
        candidates, ran, measured, predicted, finals: lines of candidates, of these with a latency,
            with a measured energy, with a prediction; lines of finals.
        at_clocks: measurements at locked clocks.
        rounds: rounds.
        latency_s, energy_j: least and greatest measured; None without any.
    """

    name: str
    candidates: int = 0
    ran: int = 0
    measured: int = 0
    predicted: int = 0
    finals: int = 0
    at_clocks: int = 0
    rounds: int = 0
    latency_s: tuple[float, float] | None = None
    energy_j: tuple[float, float] | None = None


@dataclass
class LogStat:
    """What a log holds.

    Attributes:
        name: of the log.
        device: its name.
        simulated: whether its last run says so.
        runs: in the order of the log.
        tasks: by workload hash.
    """

    name: str
    device: str
    simulated: bool
    runs: list[RunStat]
    tasks: dict[str, TaskStat]


def stat(log: Log) -> LogStat:
    """Count, in one pass.

    Raises:
        RecordFormatError: naming file and line.
    """
    runs: list[RunStat] = []
    tasks: dict[str, TaskStat] = {}
    for record in log.records():
        if isinstance(record, Header):
            runs.append(RunStat(record, differences(record, log.header)))
            continue
        runs[-1].lines[record.kind] += 1
        task = tasks.setdefault(record.workload, TaskStat(record.workload))
        if isinstance(record, TaskRecord):
            task.name = record.task
        elif isinstance(record, RoundRecord):
            task.rounds += 1
            runs[-1].seconds.update(_numbers(record.seconds))
        elif isinstance(record, FinalRecord):
            task.finals += 1
            runs[-1].device_s += record.measured.device_s
        elif isinstance(record, ClockRecord):
            task.at_clocks += 1
            runs[-1].device_s += record.measured.device_s
        elif isinstance(record, CandidateRecord):
            _add(task, record)
            runs[-1].device_s += record.measured.device_s if record.measured else 0.0
    return LogStat(
        name=log.name,
        device=device_name(log.header),
        simulated=bool(log.header.device.get("simulated")),
        runs=runs,
        tasks=tasks,
    )


def _add(task: TaskStat, record: CandidateRecord) -> None:
    if not record.key:
        return
    task.candidates += 1
    task.predicted += record.predicted_energy_j is not None
    if record.latency_s is not None:
        task.ran += 1
        task.latency_s = _wider(task.latency_s, record.latency_s)
    if record.measured is not None:
        task.measured += 1
        task.energy_j = _wider(task.energy_j, record.measured.energy_j)


def _wider(limits: tuple[float, float] | None, value: float) -> tuple[float, float]:
    return (value, value) if limits is None else (min(limits[0], value), max(limits[1], value))


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


def to_json(result: LogStat) -> dict[str, Any]:
    """As JSON values; units are in the names."""
    return {
        "log": result.name,
        "device": result.device,
        "simulated": result.simulated,
        "runs": [
            {
                "created": run.header.created,
                "objective": run.header.objective,
                "policy": run.header.policy,
                "clocks": run.header.clocks,
                "differs": run.differs,
                "lines": dict(run.lines),
                "device_s": run.device_s,
                "seconds": dict(run.seconds),
            }
            for run in result.runs
        ],
        "tasks": [
            {
                "name": task.name,
                "workload": workload,
                "candidates": task.candidates,
                "ran": task.ran,
                "measured": task.measured,
                "predicted": task.predicted,
                "finals": task.finals,
                "at_clocks": task.at_clocks,
                "rounds": task.rounds,
                "latency_s": task.latency_s,
                "energy_j": task.energy_j,
            }
            for workload, task in result.tasks.items()
        ],
    }
