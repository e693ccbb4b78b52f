"""A log as an object: where records come from, and what of it may be ranked together."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.json_lines import refuse_link_out
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.records import (
    FILE_NAME,
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    Record,
    RoundRecord,
    TaskRecord,
    read_headers,
    read_records,
)

if TYPE_CHECKING:
    import pandas


def load_log(path: str | Path) -> Log:
    """Open the log of a work directory, or a record file, for analysis.

    Every line is checked; the records themselves are read again each time they are asked for, so that
    a log may be larger than memory.

    Raises:
        ConfigurationError: there is no such folder or file.
        WorkDirError: it holds no records, or mixes devices.
        RecordFormatError: naming file and line of a broken record.
    """
    log = Log.of(path)
    for _ in log.records():
        pass
    return log


@dataclass(frozen=True, slots=True)
class Log:
    """A log of one device; its records can be read any number of times.

    Attributes:
        name: for messages.
        read: the records, from the beginning.
        headers: of all runs, at least one.
    """

    name: str
    read: Callable[[], Iterable[Record]]
    headers: tuple[Header, ...]

    @property
    def header(self) -> Header:
        """Of the last run, which counts."""
        return self.headers[-1]

    def records(self) -> Iterator[Record]:
        """All records in order, headers included."""
        yield from self.read()

    def tasks(self) -> dict[str, TaskRecord]:
        """Tasks by workload hash; one that no line names is named after its workload."""
        tasks: dict[str, TaskRecord] = {}
        for record in self.read():
            note_task(record, tasks)
        return tasks

    def candidates(self) -> Iterator[CandidateRecord]:
        """The kernels that were tried, in order."""
        return (record for record in self.read() if isinstance(record, CandidateRecord))

    def rounds(self) -> Iterator[RoundRecord]:
        """The rounds, in order."""
        return (record for record in self.read() if isinstance(record, RoundRecord))

    def finals(self) -> Iterator[FinalRecord]:
        """The measurements of finalists, in order."""
        return (record for record in self.read() if isinstance(record, FinalRecord))

    def clocks(self) -> Iterator[ClockRecord]:
        """The measurements at locked clocks, in order."""
        return (record for record in self.read() if isinstance(record, ClockRecord))

    def to_dataframe(self, kind: str = "candidate") -> pandas.DataFrame:
        """Records of one kind as a table for notebooks; needs pandas.

        Args:
            kind: ``header``, ``task``, ``candidate``, ``round``, ``final`` or ``clock``.

        Returns:
            One row a record in the order of the log, one column a field (``measured.energy_j`` for
            those of a measurement; see ``docs/logs.md``). Before them stand ``run``, from 1, and
            ``name``, the task's name.

        Raises:
            ConfigurationError: there is no such kind, or pandas is not installed.
        """
        from tvm_energy.logs.table import dataframe

        return dataframe(self, kind)

    @classmethod
    def of(cls, source: Path | str | Log | Iterable[Record]) -> Log:
        """Open a work directory, a record file, or records; only headers are read yet.

        Raises:
            ConfigurationError, WorkDirError, RecordFormatError: see `load_log`.
        """
        if isinstance(source, Log):
            return source
        if isinstance(source, (str, Path)):
            path = record_file(Path(source))
            name = str(path)
            try:
                headers = read_headers(path)
                if not headers:
                    # The reason may be a broken first line, which reading names.
                    all(True for _ in read_records(path))
            except OSError as exc:
                raise WorkDirError(f"cannot read {path}: {exc.strerror}") from exc
            log = cls(name, lambda: read_records(path), tuple(headers))
        else:
            records = list(source)
            headers = [record for record in records if isinstance(record, Header)]
            log = cls("the log", lambda: records, tuple(headers))
        if not log.headers:
            raise WorkDirError(f"{log.name} holds no records yet: no run has got beyond its start")
        _one_device(log.headers, log.name)
        return log

    @classmethod
    def together(cls, logs: Sequence[Log]) -> Log:
        """Several logs, one after the other."""
        return cls(
            name=" + ".join(log.name for log in logs),
            read=lambda: itertools.chain.from_iterable(log.read() for log in logs),
            headers=tuple(header for log in logs for header in log.headers),
        )


def note_task(record: Record, tasks: dict[str, TaskRecord]) -> None:
    """Take a record into a table of tasks; a later line of a task replaces the earlier one."""
    if isinstance(record, TaskRecord):
        tasks[record.workload] = record
    elif (
        isinstance(record, (CandidateRecord, FinalRecord, ClockRecord))
        and record.workload not in tasks
    ):
        tasks[record.workload] = TaskRecord(task=record.workload, workload=record.workload)


def differences(one: Header, other: Header) -> list[str]:
    """Why the figures of two runs must not be ranked together; empty when they may be."""
    reasons = []
    if one.device.get("uuid") != other.device.get("uuid"):
        reasons.append(f"device ({device_name(one)}, {device_name(other)})")
    if locked(one) != locked(other):
        reasons.append(f"clocks ({_clocks(one)}, {_clocks(other)})")
    if one.meter and other.meter:
        reasons += [
            f"{name} ({one.meter.get(name)}, {other.meter.get(name)})"
            for name in _SENSOR
            if one.meter.get(name) != other.meter.get(name)
        ]
    # A setting that a plan does not name has its default: later versions may have more of them.
    settings, others = {**_DEFAULT_PLAN, **one.plan}, {**_DEFAULT_PLAN, **other.plan}
    reasons += [
        f"{name} ({settings.get(name)}, {others.get(name)})"
        for name in sorted({*settings, *others})
        if settings.get(name) != others.get(name)
    ]
    return reasons


_DEFAULT_PLAN = dataclasses.asdict(MeasurementPlan())
#: What of a meter decides whether two energies mean the same.
_SENSOR = ("meter", "method", "scope")


#: What of a header's clocks held for the whole run; the rest concerns lines that name their own clock.
_LOCKED = ("core_mhz", "memory_mhz")


def locked(header: Header) -> dict[str, Any]:
    """The clocks to which the whole run was locked; empty when the driver chose them."""
    clocks = header.clocks or {}
    return {name: clocks[name] for name in _LOCKED if clocks.get(name) is not None}


def _clocks(header: Header) -> str:
    return " ".join(f"{name} {value}" for name, value in locked(header).items()) or "not locked"


def comparable(records: Iterable[Record], header: Header) -> tuple[list[Record], int]:
    """Leave out what was measured in another way than under a header.

    Energies go when the plan or the sensor differs; latencies stay. Under other clocks neither
    means the same, so that the whole line goes.

    Returns:
        The records, and how many lines lost their energy or were left out.
    """
    left_out = Counter[str]()
    return list(filtered(records, header, left_out)), left_out.total()


def filtered(records: Iterable[Record], header: Header, left_out: Counter[str]) -> Iterator[Record]:
    """`comparable` as the records pass; counts what is left out."""
    same_clocks = same_energy = True
    for record in records:
        if isinstance(record, Header):
            same_clocks = locked(record) == locked(header)
            same_energy = not differences(record, header)
        elif same_energy:
            pass
        elif isinstance(record, (FinalRecord, ClockRecord)) or (
            isinstance(record, CandidateRecord) and not same_clocks
        ):
            left_out["line"] += 1
            continue
        elif isinstance(record, CandidateRecord) and record.measured:
            left_out["energy"] += 1
            record = dataclasses.replace(record, measured=None)
        yield record


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
        refuse_link_out(path)
        return path
    if not work_dir.exists():
        raise ConfigurationError(
            f"{work_dir} does not exist; give the --work-dir of a `tvm-energy tune` run"
        )
    return work_dir


def _one_device(headers: Sequence[Header], where: str) -> None:
    devices = {str(header.device.get("uuid")): device_name(header) for header in headers}
    if len(devices) > 1:
        names = " and ".join(f"{name} ({uuid})" for uuid, name in sorted(devices.items()))
        raise WorkDirError(
            f"{where} mixes runs of different devices: {names}. Their joules cannot be compared; "
            "use one --work-dir for each device"
        )


def device_name(header: Header) -> str:
    """The name by which a user knows the device: ``sim:a100``, or the name the driver gives."""
    uuid = str(header.device.get("uuid", ""))
    return uuid if uuid.startswith("sim:") else str(header.device.get("name", "unknown device"))
