"""The energy record file of a work directory: what was measured, what was only predicted, and why.

``database_energy_record.json`` lies beside the stock files of MetaSchedule. It holds one JSON object
a line, is only ever appended to, and is flushed after each round. ``docs/formats.md`` describes it.

Kinds of lines::

    header     first line of each run: schema, device, meter, objective, policy, plan, versions, seed
    task       one task of the run: name, workload hash, weight
    candidate  one kernel: key, latency, measured energy or (never both) predicted energy, or its error
    round      what the policy did in one round, and how long its parts took
    final      a finalist measured again at the end
    clock      a finalist measured at a locked clock

A kernel is known by its *key*, the hash of its schedule trace within its workload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.json_lines import (
    json_hash,
    parse_line,
    read_lines,
    refuse_link_out,
    repair_tail,
)
from tvm_energy.measurement import EnergyMeasurement

logger = logging.getLogger(__name__)

FILE_NAME = "database_energy_record.json"
SCHEMA_VERSION = 3

#: Bounds of what a run of ours writes: seeds have 64 bits, and no launch takes a femtosecond or costs
#: a femtojoule. Within them, the quotients and products that reports compute stay finite.
_LARGEST = 2**64
_SMALLEST = 1e-15
#: Levels of objects and lists inside the free fields (`Header.device`, `RoundRecord.policy_state` ...).
_DEEPEST = 8


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
        clocks: ``core_mhz``, ``memory_mhz`` where the whole run was locked to them; ``finalists`` (how many
            clocks the finalists are measured at) and ``per_kernel`` where kernels and clocks are chosen
            together; None when everything was left to the driver.
        model: ``prior`` of the energy model, and ``start``: ``file``, ``sha256``, ``samples`` and ``energies``
            (whether they were used) of the earlier model that the run began with, null without one; None
            where that was not recorded.
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
    clocks: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
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
        chosen: keys of the kernels that the policy chose to measure, in that order; None where the
            run did not record it (version 1).
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
    chosen: tuple[str, ...] | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockRecord:
    """A finalist, measured while the core clock was locked.

    Attributes:
        clock_mhz: the clock asked for; `EnergyMeasurement.clock_mhz` is the one observed.
        confirmed: measured with the long windows of a final, since the pair of kernel and clock was about
            to be chosen. The last record of a pair counts.
    """

    kind: ClassVar[str] = "clock"
    workload: str
    key: str
    clock_mhz: float
    measured: EnergyMeasurement
    confirmed: bool = False


Record = Header | TaskRecord | CandidateRecord | RoundRecord | FinalRecord | ClockRecord
KINDS: dict[str, type[Any]] = {
    cls.kind: cls
    for cls in (Header, TaskRecord, CandidateRecord, RoundRecord, FinalRecord, ClockRecord)
}


def to_json(record: Record) -> dict[str, Any]:
    """A record as the JSON object of its line."""
    values: dict[str, Any] = {"kind": record.kind}
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        if isinstance(value, EnergyMeasurement):
            value = value.to_json()
        elif isinstance(value, tuple):
            value = list(value)
        values[item.name] = value
    return values


def from_json(values: Any, schema: int = SCHEMA_VERSION) -> Record:
    """The inverse of `to_json`, for this and every older version of the format.

    Args:
        values: the parsed line.
        schema: version of the run that the line belongs to; a header tells its own.

    Raises:
        RecordFormatError: not a record, or written by a newer version.
    """
    if not isinstance(values, dict):
        raise RecordFormatError(f"expected a JSON object, got {type(values).__name__}")
    cls = KINDS.get(str(values.get("kind")))
    if cls is None:
        raise RecordFormatError(
            f"unknown kind {_short(values.get('kind'))}; known are {', '.join(KINDS)}"
        )
    if cls is Header:
        schema = schema_of(values)
    for upgrade in _UPGRADES[schema - 1 :]:
        values = upgrade(values)
    arguments = _checked(cls, values)
    if cls is not RoundRecord and arguments.get("measured") is not None:
        arguments["measured"] = _measurement(arguments["measured"])
    elif cls is RoundRecord and arguments.get("chosen") is not None:
        arguments["chosen"] = tuple(arguments["chosen"])
    record: Record = cls(**arguments)
    return record


def schema_of(header: Mapping[str, Any]) -> int:
    """Version of the format that a header line announces.

    Raises:
        RecordFormatError: there is no such version, or it is newer than this reader.
    """
    schema = header.get("schema")
    if type(schema) is not int or schema < 1:
        raise RecordFormatError(f"schema must be a version number, got {_short(schema)}")
    if schema > SCHEMA_VERSION:
        raise RecordFormatError(
            f"schema {_short(schema)} is newer than this tvm-energy, which reads 1 to "
            f"{SCHEMA_VERSION}; update tvm-energy to read this file"
        )
    return schema


def _from_1(values: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no locked clocks, and did not record the policy's choice."""
    if values.get("kind") == Header.kind:
        return {**values, "schema": 2, "clocks": None}
    return {**values, "chosen": None} if values.get("kind") == RoundRecord.kind else values


def _from_2(values: dict[str, Any]) -> dict[str, Any]:
    """Version 2 had no kernels at locked clocks."""
    return {**values, "schema": 3} if values.get("kind") == Header.kind else values


#: The n-th one, from 0, makes a line of version n + 2 of one of version n + 1.
_UPGRADES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_from_1, _from_2)


# -- what a field may hold -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What one field may hold; `tvm_energy/record.schema.json` says the same.

    Attributes:
        name: of the field.
        type: ``number``, ``integer``, ``boolean``, ``string``, ``object``, ``names`` (list of
            strings) or ``measurement``.
        nullable, required: whether it may be null, and whether it may be missing.
        low, high: bounds of a number.
    """

    name: str
    type: str
    nullable: bool
    required: bool
    low: float = 0
    high: float = 0


_TYPES = {
    "float": "number",
    "int": "integer",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "tuple": "names",
    "EnergyMeasurement": "measurement",
}


def rules_of(cls: type[Any]) -> tuple[Rule, ...]:
    """Rules of the fields of a kind of record, or of `EnergyMeasurement`, from their annotations."""
    rules = []
    for item in dataclasses.fields(cls):
        parts = [part.strip() for part in str(item.type).split("|")]
        signed = item.name in ("snr_db", "seed") or item.name.endswith("_c")
        positive = item.name in ("latency_s", "energy_j")
        rules.append(
            Rule(
                name=item.name,
                type=_TYPES[parts[0].partition("[")[0]],
                nullable="None" in parts,
                required=item.default is dataclasses.MISSING
                and item.default_factory is dataclasses.MISSING,
                low=-_LARGEST if signed else _SMALLEST if positive else 0,
                # Counts fit into 64 bits with a sign, as tables and other languages want them.
                high=_LARGEST if parts[0] == "float" or signed else 2**63 - 1,
            )
        )
    return tuple(rules)


_RULES = {cls: rules_of(cls) for cls in (*KINDS.values(), EnergyMeasurement)}

#: Python type of a value that needs no second look, by the type in the rule.
_USUAL = {"number": float, "integer": int, "string": str, "boolean": bool}
#: The same rules as tuples, since every field of every line passes here.
_TABLES: dict[type[Any], tuple[tuple[str, Any, float, float, bool, Rule], ...]] = {
    cls: tuple((r.name, _USUAL.get(r.type), r.low, r.high, r.nullable, r) for r in rules)
    for cls, rules in _RULES.items()
}


def _measurement(values: dict[str, Any]) -> EnergyMeasurement:
    arguments = _checked(EnergyMeasurement, values)
    arguments["throttle_reasons"] = tuple(arguments.get("throttle_reasons", ()))
    for name in ("method", "meter", "scope", "quality"):
        if name in arguments:  # few different ones, in as many copies as there are lines
            arguments[name] = sys.intern(arguments[name])
    return EnergyMeasurement(**arguments)


def _checked(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """The known fields of an object; whatever no run of ours writes is refused."""
    arguments: dict[str, Any] = {}
    for name, usual, low, high, nullable, rule in _TABLES[cls]:
        try:
            value = arguments[name] = values[name]
        except KeyError:
            if rule.required:
                raise RecordFormatError(f"{name} is missing") from None
            continue
        if value is None:
            if nullable:
                continue
        elif type(value) is usual:
            # The comparison holds for integers of any size and is false for NaN.
            if usual is float or usual is int:
                if low <= value <= high:
                    continue
            elif usual is bool or value.isascii() or _is_text(value):
                continue
        elif _is_unusual(rule, value):
            continue
        raise RecordFormatError(f"{name} must be {_expected(rule)}, got {_short(value)}")
    return arguments


def _is_unusual(rule: Rule, value: Any) -> bool:
    """Whether a value fits though it is not of the usual type: whole numbers, objects, lists."""
    if rule.type == "number":
        return type(value) is int and rule.low <= value <= rule.high
    if rule.type == "names":
        return isinstance(value, list) and all(
            isinstance(item, str) and _is_text(item) for item in value
        )
    if rule.type == "measurement":
        return isinstance(value, dict)
    return rule.type == "object" and isinstance(value, dict) and _is_plain(value)


def _expected(rule: Rule) -> str:
    text = {
        "number": "a number",
        "integer": "a whole number",
        "boolean": "true or false",
        "string": "text",
        "object": f"an object of at most {_DEEPEST} levels, with finite numbers",
        "names": "a list of names",
        "measurement": "an energy measurement",
    }[rule.type]
    if rule.type in ("number", "integer"):
        text += {0: " not below 0", _SMALLEST: " above 0"}.get(rule.low, "")
        text += ", finite"
    return text + " or null" * rule.nullable


def _is_text(value: str) -> bool:
    """Half of a surrogate pair cannot be written to any file."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether free content is shallow, with text that can be written and numbers in bounds."""
    if isinstance(value, dict):
        return depth > 0 and all(
            _is_text(key) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return _is_text(value)
    return value is None or bool(-_LARGEST <= value <= _LARGEST)


def _short(value: Any) -> str:
    """A value from a file, for an error message."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "a huge number"
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# -- files -----------------------------------------------------------------------------------------


class LineReader:
    """Makes records of the lines of one file, in order; knows which version each run was written in.

    Args:
        path: only named in errors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schema: int | None = None

    def read(self, number: int, line: bytes) -> Record:
        """The record of a line.

        Raises:
            RecordFormatError: naming file and line.
        """
        try:
            values = parse_line(line)
            record = from_json(values, self._schema or SCHEMA_VERSION)
        except RecordFormatError as exc:
            raise RecordFormatError(f"{self._path}, line {number}: {exc}") from exc
        if isinstance(record, Header):
            self._schema = schema_of(values)
        elif self._schema is None:
            self._schema = SCHEMA_VERSION
            raise RecordFormatError(
                f"{self._path}, line {number}: expected a header, got {record.kind!r}"
            )
        return record


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, in order. A torn last line (a run that was killed) is left out.

    Raises:
        RecordFormatError: naming file and line, for any other line that is not a record.
        WorkDirError: it is not a regular file.
        FileNotFoundError: there is no such file.
    """
    reader = LineReader(path)
    for number, line in read_lines(path):
        try:
            record = reader.read(number, line)
        except RecordFormatError:
            if not line.endswith(b"\n"):
                logger.warning(
                    "%s, line %d is torn (a run was interrupted); left out", path, number
                )
                return
            raise
        yield record


def read_headers(path: Path) -> list[Header]:
    """The headers of a file; other lines are neither parsed nor checked.

    Raises:
        RecordFormatError, WorkDirError, FileNotFoundError: see `read_records`.
    """
    reader = LineReader(path)
    headers = []
    for number, line in read_lines(path):
        # A header's line holds the word, unless its letters are written as escapes.
        if b"header" not in line and b"\\u" not in line:
            continue
        try:
            record = reader.read(number, line)
        except RecordFormatError:
            if line.endswith(b"\n"):
                raise
            break
        if isinstance(record, Header):
            headers.append(record)
    return headers


class RecordLog:
    """Appends records to the energy record file of a work directory.

    Use as a context manager, or call `close`.
    """

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / FILE_NAME
        refuse_link_out(self.path)
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


def kernel_key(trace: Any) -> str:
    """`CandidateRecord.key` of a schedule trace, given as the JSON value of a tuning record."""
    return json_hash(_with_rewrite_marks(trace))


#: Layout rewriting (common on CPUs) marks blocks with True, which TVM's file turns into 1.
_REWRITE_MARK = "meta_schedule.layout_rewrite_preproc"


def _with_rewrite_marks(trace: Any) -> Any:
    """A trace in which the marks are booleans, as in the search, wherever it comes from."""
    match trace:
        case [list() as instructions, *rest]:
            return [[_with_rewrite_mark(item) for item in instructions], *rest]
        case _:
            return trace


def _with_rewrite_mark(instruction: Any) -> Any:
    match instruction:
        case ["Annotate", [block, (0 | 1) as mark, *more], [name], outputs] if (
            name == _REWRITE_MARK
        ):
            return ["Annotate", [block, bool(mark), *more], [name], outputs]
        case _:
            return instruction


def now() -> float:
    """Unix time in seconds, for `Header.created`."""
    return time.time()
