"""The energy record file of a work directory: what was measured, what was only predicted, and why.

``database_energy_record.json`` lies beside the stock files of MetaSchedule. It holds one JSON object
a line, is only ever appended to, and is flushed after each round. ``docs/formats.md`` describes it.

Kinds of lines::

    header     first line of each run: schema, device, meter, objective, policy, plan, versions, seed
    task       one task of the run: name, workload hash, weight
    candidate  one kernel: key, latency, measured energy or (never both) predicted energy, or its error
    round      what the policy did in one round, and how long its parts took
    final      a finalist measured again at the end

A kernel is known by its *key*, the hash of its schedule trace within its workload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.measurement import EnergyMeasurement

logger = logging.getLogger(__name__)

FILE_NAME = "database_energy_record.json"
SCHEMA_VERSION = 1

#: Bounds of what a run of ours writes: seeds have 64 bits, and no launch takes a femtosecond or costs
#: a femtojoule. Within them, the quotients and products that reports compute stay finite.
_LARGEST = 2**64
_SMALLEST = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """First line of a run. Runs that continue in one file each write one.

    Attributes:
        device: ``name``, ``uuid``, ``driver``, ``target``, ``simulated`` ...
        meter: `MeterInfo.to_json`, or None when energy is not measured.
        objective, policy: their spec strings.
        plan: the measurement plan as a dict.
        versions: of tvm_energy, tvm, xgboost, python.
        seed: of the run.
        created: Unix time in seconds.
    """

    kind: ClassVar[str] = "header"
    device: dict[str, Any]
    meter: dict[str, Any] | None
    objective: str
    policy: str
    plan: dict[str, Any]
    versions: dict[str, str]
    seed: int
    created: float
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """A task: one kernel to be tuned, and how often the network calls it (`weight`)."""

    kind: ClassVar[str] = "task"
    task: str
    workload: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecord:
    """One kernel of the search.

    Attributes:
        workload: structural hash of the workload (first column of ``database_workload.json``).
        key: hash of the schedule trace.
        module: structural hash of the scheduled module; lets a later run know it again before building.
        round: round of this task in which it was tried, from 0.
        latency_s: mean run time of one launch; None when it failed.
        measured: the energy measurement; None when it was not measured.
        predicted_energy_j, predicted_stderr_j: the model's belief at that time, made *before* any
            measurement of this kernel; None when there was no model yet.
        error: why the kernel has no latency, or why its energy could not be measured.
    """

    kind: ClassVar[str] = "candidate"
    workload: str
    key: str
    module: str = ""
    round: int
    latency_s: float | None
    measured: EnergyMeasurement | None = None
    predicted_energy_j: float | None = None
    predicted_stderr_j: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round of one task.

    Attributes:
        candidates, gated, measured: how many were tried, passed the latency gate, had energy measured.
        policy_state: the policy's state after the round, as JSON.
        snr_db: quality of the predictions of this round, where it could be computed.
        best_latency_s, best_cost: best so far.
        seconds: wall time of the parts of the round (``measure``, ``learn``, ...); ``measure_device`` is device
            time, which is virtual for a simulated device.
    """

    kind: ClassVar[str] = "round"
    workload: str
    round: int
    candidates: int
    gated: int
    measured: int
    policy_state: dict[str, Any] = field(default_factory=dict)
    snr_db: float | None = None
    best_latency_s: float | None = None
    best_cost: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecord:
    """A finalist, measured again with long interleaved windows.

    Attributes:
        candidates: how many kernels of the task had run when it was measured; tells whether the
            result is still up to date when a run is continued.
    """

    kind: ClassVar[str] = "final"
    workload: str
    key: str
    measured: EnergyMeasurement
    candidates: int


Record = Header | TaskRecord | CandidateRecord | RoundRecord | FinalRecord
_KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Header, TaskRecord, CandidateRecord, RoundRecord, FinalRecord)
}


def to_json(record: Record) -> dict[str, Any]:
    """A record as the JSON object of its line."""
    values: dict[str, Any] = {"kind": record.kind}
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if isinstance(value, EnergyMeasurement):
            value = value.to_json()
        values[item.name] = value
    return values


def from_json(values: Any) -> Record:
    """The inverse of `to_json`.

    Raises:
        RecordFormatError: not a record, or written by a newer version.
    """
    if not isinstance(values, Mapping):
        raise RecordFormatError(f"expected a JSON object, got {type(values).__name__}")
    cls = _KINDS.get(str(values.get("kind")))
    if cls is None:
        raise RecordFormatError(
            f"unknown kind {values.get('kind')!r}; known are {', '.join(_KINDS)}"
        )
    if cls is Header and values.get("schema") != SCHEMA_VERSION:
        raise RecordFormatError(
            f"schema {values.get('schema')!r} is not supported (this version reads {SCHEMA_VERSION}); "
            "a newer tvm-energy wrote it"
        )
    known = {item.name: item for item in dataclasses.fields(cls)}
    arguments = {key: value for key, value in values.items() if key in known}
    try:
        if arguments.get("measured") is not None and cls is not RoundRecord:
            arguments["measured"] = EnergyMeasurement.from_json(arguments["measured"])
        record: Record = cls(**arguments)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordFormatError(f"{cls.kind} record: {exc}") from exc
    _check(record)
    return record


def _check(record: Record) -> None:
    """Reject values that no run of ours writes."""
    for item in dataclasses.fields(record):
        value, kind = getattr(record, item.name), str(item.type)
        if isinstance(value, EnergyMeasurement):
            _check(value)  # type: ignore[arg-type]
        elif value is None:
            if "None" not in kind:
                raise RecordFormatError(f"{item.name} must not be null")
        elif kind.startswith(("float", "int")):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise RecordFormatError(f"{item.name} must be a number, got {value!r}")
            signed = item.name in ("snr_db", "seed") or item.name.endswith("_c")
            # The comparison holds for integers of any size and is false for NaN.
            if not (-_LARGEST if signed else 0) <= value <= _LARGEST:
                raise RecordFormatError(
                    f"{item.name} must be finite and not negative, got {str(value)[:40]}"
                )
        elif kind.startswith("bool"):
            if not isinstance(value, bool):
                raise RecordFormatError(f"{item.name} must be true or false, got {value!r}")
        elif (kind.startswith("str") and not isinstance(value, str)) or (
            kind.startswith("dict") and not isinstance(value, dict)
        ):
            raise RecordFormatError(f"{item.name} must be a {kind.split('[')[0]}, got {value!r}")
    for name in ("latency_s", "energy_j"):
        value = getattr(record, name, None)
        if value is not None and value < _SMALLEST:
            raise RecordFormatError(f"{name} must be positive, got {value!r}")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order. A torn last line (a run that was killed) is left out.

    Raises:
        RecordFormatError: naming file and line, for any other line that is not a record.
        FileNotFoundError: there is no such file.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = from_json(parse_line(line))
            except RecordFormatError as exc:
                if not line.endswith("\n"):
                    logger.warning(
                        "%s, line %d is torn (a run was interrupted); left out", path, number
                    )
                    return
                raise RecordFormatError(f"{path}, line {number}: {exc}") from exc
            if number == 1 and not isinstance(record, Header):
                raise RecordFormatError(f"{path}, line 1: expected a header, got {record.kind!r}")
            yield record


def parse_line(line: str) -> Any:
    """Parse one line of JSON; NaN and infinities are refused.

    Raises:
        RecordFormatError: with the reason.
    """
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise RecordFormatError(f"not valid JSON ({exc})") from exc


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def repair_tail(path: Path) -> bool:
    """Cut a torn last line off a file of one JSON value a line. True when something was cut.

    A killed run leaves at most one unfinished line, and only at the end, since lines are appended
    and flushed whole.
    """
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("r+b") as file:
        data = file.read()
        if data.endswith(b"\n"):
            return False
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:])
        except (ValueError, RecursionError):
            file.truncate(start)
            logger.warning("%s: the unfinished last line of an interrupted run was cut off", path)
            return True
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
        return False


class RecordLog:
    """Appends records to the energy record file of a work directory.

    Use as a context manager, or call `close`.
    """

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / FILE_NAME
        try:
            repair_tail(self.path)
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as exc:
            raise WorkDirError(
                f"cannot write {self.path}: {exc.strerror}; choose another --work-dir"
            ) from exc

    def append(self, record: Record) -> None:
        """Add one record; call `flush` at the end of a batch."""
        self._file.write(json.dumps(to_json(record), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def now() -> float:
    """Unix time in seconds, for `Header.created`."""
    return time.time()
