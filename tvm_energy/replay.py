"""What a run found, worked out from its records alone: no device, no TVM, nothing written.

Because logs hold raw latency and energy, the same log can be summarised under any objective.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.objective import Objective, parse_objective
from tvm_energy.ranking import Kernel, choose, kernels_by_workload
from tvm_energy.records import (
    FILE_NAME,
    CandidateRecord,
    FinalRecord,
    Header,
    Record,
    TaskRecord,
    read_records,
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
    """

    key: str
    latency_s: float
    energy_j: float | None
    energy_stderr_j: float | None
    power_w: float | None
    measured: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the tasks with a result, each counted `weight` times: one pass of the network.

    Energies are None when one of these tasks has no measured energy.
    """

    tasks: int
    fastest_latency_s: float
    fastest_energy_j: float | None
    best_latency_s: float
    best_energy_j: float | None
    saved_fraction: float | None


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


def summarize(source: Path | str | Iterable[Record], objective: str | None = None) -> RunSummary:
    """Summarise a work directory, a record file, or records.

    Args:
        source: where the records are; only read.
        objective: chooses the winners; by default the objective of the last run.

    Raises:
        ConfigurationError: there is no such folder, the objective is not known, or it needs energy
            and the log has none.
        WorkDirError: the folder has no records, cannot be read, or mixes devices.
        RecordFormatError: naming file and line.
    """
    records, where = _load(source)
    headers = [record for record in records if isinstance(record, Header)]
    if not headers:
        raise WorkDirError(f"{where} holds no records yet: no run has got beyond its start")
    _one_device(headers, where)
    header = headers[-1]
    chosen = parse_objective(
        objective or header.objective, max_power_w=(header.meter or {}).get("max_power_w")
    )
    records, set_aside = comparable(records, header.plan)
    kernels = kernels_by_workload(records)
    _has_energy(kernels, chosen, header, where)
    lines = _by_workload(records)
    tasks = tuple(
        _summarize_task(task, lines[task.workload], kernels.get(task.workload, {}), chosen)
        for task in _tasks(records)
    )
    return RunSummary(
        simulated=_is_simulated(header, kernels),
        device=_device_name(header),
        objective=chosen.spec,
        policy=header.policy,
        header=header,
        runs=len(headers),
        set_aside=set_aside,
        tasks=tasks,
        totals=_totals(tasks),
    )


def comparable(records: Iterable[Record], plan: Mapping[str, Any]) -> tuple[list[Record], int]:
    """Leave out energies that were measured under another plan; latencies stay.

    Returns:
        The records, and how many energies were left out.
    """
    kept: list[Record] = []
    same, left_out = True, 0
    for record in records:
        if isinstance(record, Header):
            same = record.plan == plan
        elif not same and isinstance(record, FinalRecord):
            left_out += 1
            continue
        elif not same and isinstance(record, CandidateRecord) and record.measured:
            left_out += 1
            record = dataclasses.replace(record, measured=None)
        kept.append(record)
    return kept, left_out


def record_file(work_dir: Path) -> Path:
    """The record file of a work directory (or the file itself, when that is given).

    Raises:
        ConfigurationError: there is no such folder.
        WorkDirError: the folder holds no record file.
    """
    if work_dir.is_dir():
        path = work_dir / FILE_NAME
        if not path.exists():
            raise WorkDirError(
                f"{work_dir} has no {FILE_NAME}: it is no work directory of tvm-energy, "
                "or no run has started there"
            )
        return path
    if not work_dir.exists():
        raise ConfigurationError(
            f"{work_dir} does not exist; give the --work-dir of a `tvm-energy tune` run"
        )
    return work_dir


def _load(source: Path | str | Iterable[Record]) -> tuple[list[Record], str]:
    if not isinstance(source, (str, Path)):
        return list(source), "the log"
    path = record_file(Path(source))
    try:
        return list(read_records(path)), str(path)
    except OSError as exc:
        raise WorkDirError(f"cannot read {path}: {exc.strerror}") from exc


def _one_device(headers: Sequence[Header], where: str) -> None:
    devices = {str(header.device.get("uuid")): _device_name(header) for header in headers}
    if len(devices) > 1:
        names = " and ".join(f"{name} ({uuid})" for uuid, name in sorted(devices.items()))
        raise WorkDirError(
            f"{where} mixes runs of different devices: {names}. Their joules cannot be compared; "
            "use one --work-dir for each device"
        )


def _device_name(header: Header) -> str:
    """The name by which a user knows the device: ``sim:a100``, or the name the driver gives."""
    uuid = str(header.device.get("uuid", ""))
    return uuid if uuid.startswith("sim:") else str(header.device.get("name", "unknown device"))


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


def _tasks(records: Sequence[Record]) -> list[TaskRecord]:
    """One record a workload; a continued run may name a task again, with its present weight."""
    tasks: dict[str, TaskRecord] = {}
    for record in records:
        if isinstance(record, TaskRecord):
            tasks[record.workload] = record
        elif isinstance(record, (CandidateRecord, FinalRecord)):
            tasks.setdefault(
                record.workload, TaskRecord(task=record.workload, workload=record.workload)
            )
    return list(tasks.values())


def _by_workload(records: Sequence[Record]) -> dict[str, list[Record]]:
    """What concerns the kernels of one workload; empty for one that no line names."""
    lines: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if isinstance(record, (CandidateRecord, FinalRecord)):
            lines[record.workload].append(record)
    return lines


def _summarize_task(
    task: TaskRecord, records: Sequence[Record], kernels: dict[str, Kernel], objective: Objective
) -> TaskSummary:
    tried = [record for record in records if isinstance(record, CandidateRecord)]
    finals = [record for record in records if isinstance(record, FinalRecord)]
    # A line without a key says that no candidate at all could be made.
    keys = ({record.key for record in tried} | {record.key for record in finals}) - {""}
    errors = Counter(_reason(record.error) for record in tried if record.error)
    choice = choose(kernels.values(), objective)
    fastest = _summarize_kernel(choice.fastest) if choice else None
    best = _summarize_kernel(choice.best) if choice else None
    measured = [record.measured for record in tried if record.measured]
    measured += [record.measured for record in finals]
    return TaskSummary(
        name=task.task,
        workload=task.workload,
        weight=task.weight,
        candidates=len(keys),
        failed=len(keys - kernels.keys()),
        energy_measurements=sum(1 for kernel in kernels.values() if kernel.measured),
        predicted_only=sum(
            1
            for kernel in kernels.values()
            if not kernel.measured and kernel.predicted_energy_j is not None
        ),
        finalists=len({record.key for record in finals}),
        fastest=fastest,
        best=best,
        ties=tuple(map(_summarize_kernel, choice.ties)) if choice else (),
        saved_fraction=_saved(
            fastest.energy_j if fastest else None, best.energy_j if best else None
        ),
        reason=None if choice else _why_nothing(len(keys), kernels, errors),
        errors=dict(errors.most_common()),
        device_s=math.fsum(item.device_s for item in measured),
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
    return Totals(
        tasks=len(pairs),
        fastest_latency_s=math.fsum(weight * kernel.latency_s for weight, kernel in fastest),
        fastest_energy_j=fastest_j,
        best_latency_s=math.fsum(weight * kernel.latency_s for weight, kernel in best),
        best_energy_j=best_j,
        saved_fraction=_saved(fastest_j, best_j),
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
