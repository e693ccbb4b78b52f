"""Join logs of one device: runs in the order of their start, every line once, contradictions told.

Two headers with the same content are the same run, seen through two copies of its log; of its lines each
content is kept once. Lines are copied as they are, whatever version wrote them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_energy.ansor_log import LOG_FILE, check_log, read_log
from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.json_lines import LONGEST_STOCK_LINE, lines_of, open_file, parse_line
from tvm_energy.logs.load import Log, device_name, differences, locked, record_file
from tvm_energy.logs.output import new_file, refuse_existing
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.records import (
    FILE_NAME,
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    LineReader,
    Record,
    RoundRecord,
    TaskRecord,
)
from tvm_energy.work_dir import (
    TUNING_RECORD_FILE,
    WORKLOAD_FILE,
    Problem,
    check_stock,
    is_tuning_record,
    is_workload,
    stock_values,
)

#: Two measurements of one kernel disagree when they differ by more standard errors than this.
DISAGREE_SIGMA = 4.0


@dataclass
class Merged:
    """What came of it.

    Attributes:
        runs, lines: written.
        duplicates: lines left out because their content was there already.
        conflicts: lines that contradict one that was kept: another content for the same line of the
            same run (left out), or another energy for the same kernel measured in the same way (kept,
            since both are measurements).
        notes: what a reader should know: runs whose figures are not ranked with those of the last.
        workloads, tuning_records, ansor_records: lines of the stock files, and of the log of legacy Ansor;
            0 where no source has them.
    """

    runs: int = 0
    lines: int = 0
    duplicates: int = 0
    conflicts: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    workloads: int = 0
    tuning_records: int = 0
    ansor_records: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """One run in one file.

    Attributes:
        header, content: of its first line, and a digest of it.
        path, offset, before: where reading starts, and how many lines lie before.
        number: of the header's line.
    """

    header: Header
    content: bytes
    path: Path
    offset: int
    before: int
    number: int


def merge(sources: Sequence[Path], output: Path) -> Merged:
    """Merge work directories or record files into a new work directory.

    The stock databases and Ansor logs of work directories are merged too. Sources are only read.

    Raises:
        ConfigurationError: fewer than two sources, a missing one, or the output exists.
        WorkDirError: the sources are of different devices.
        RecordFormatError: naming file and line of a broken line; a torn last line is left out.
    """
    if len(sources) < 2:
        raise ConfigurationError("merging needs two logs at least")
    for name in (FILE_NAME, WORKLOAD_FILE, TUNING_RECORD_FILE, LOG_FILE):
        refuse_existing(output / name)
    logs = {source: Log.of(source) for source in sources}
    _same_device(list(logs.values()))
    directories = [source for source in sources if source.is_dir()]
    for directory in directories:
        check_stock(directory)
        check_log(directory)
    runs: dict[bytes, list[_Part]] = {}
    for source in sources:
        for part in _parts(record_file(source)):
            runs.setdefault(part.content, []).append(part)
    # Sorting is stable: runs that started at the same time stay in the order of the sources.
    ordered = sorted(runs.values(), key=lambda parts: parts[0].header.created)
    result = Merged(runs=len(ordered))
    last = ordered[-1][0].header
    for parts in ordered:
        reasons = differences(parts[0].header, last)
        if reasons:
            result.notes.append(
                f"the run of {parts[0].path}, line {parts[0].number} is not ranked with the last one: "
                f"other {', '.join(reasons)}"
            )
    energies = _Energies()
    with new_file(output / FILE_NAME) as file:
        for parts in ordered:
            energies.header = parts[0].header
            for line in _merged_run(parts, result, energies):
                file.write(line)
    _merge_stock(directories, output, result)
    _merge_ansor(directories, output, result)
    return result


def _same_device(logs: Sequence[Log]) -> None:
    """One device only: joules of two devices in one log would be ranked together."""
    devices: dict[str, Log] = {}
    for log in logs:
        devices.setdefault(str(log.header.device.get("uuid")), log)
    if len(devices) > 1:
        names = ", ".join(
            f"{log.name} of {device_name(log.header)} ({uuid})" for uuid, log in devices.items()
        )
        raise WorkDirError(
            f"logs of different devices are not merged: {names}. Merge those of each device, "
            "and look at several together with `tvm-energy replay A B`"
        )


def _parts(path: Path) -> Iterator[_Part]:
    """The runs of a file."""
    reader = LineReader(path)
    with open_file(path) as file:
        offset = number = 0
        while True:
            before = number
            found = next(lines_of(file, number=before), None)
            if found is None:
                return
            number, line = found
            if b"header" in line or b"\\u" in line:
                try:
                    record = reader.read(number, line)
                except RecordFormatError:
                    if line.endswith(b"\n"):
                        raise
                    return
                if isinstance(record, Header):
                    content = _digest(parse_line(line))
                    yield _Part(record, content, path, offset, before, number)
            offset = file.tell()


def _merged_run(parts: Sequence[_Part], result: Merged, energies: _Energies) -> Iterator[str]:
    """Lines of one run from all its copies."""
    contents: set[bytes] = set()
    kept: dict[tuple[Any, ...], tuple[Path, int]] = {}
    for copy, part in enumerate(parts):
        for number, line, record in _lines_of_run(part):
            content = _digest(parse_line(line))
            if content in contents:
                result.duplicates += 1
                continue
            identity = _identity(record)
            if copy and identity in kept:
                path, first = kept[identity]
                result.conflicts.append(
                    Problem(
                        part.path,
                        number,
                        f"another content for a {record.kind} line of the same run than in "
                        f"{path}, line {first}; left out",
                    )
                )
                continue
            contents.add(content)
            if len(parts) > 1:
                kept.setdefault(identity, (part.path, number))
            result.lines += 1
            if problem := energies.see(record, part.path, number):
                result.conflicts.append(problem)
            yield line.decode().rstrip("\n") + "\n"


def _lines_of_run(part: _Part) -> Iterator[tuple[int, bytes, Record]]:
    """Number, text and record of each line of a run, its header first."""
    reader = LineReader(part.path)
    with open_file(part.path) as file:
        file.seek(part.offset)
        for number, line in lines_of(file, number=part.before):
            try:
                record = reader.read(number, line)
            except RecordFormatError:
                if line.endswith(b"\n"):
                    raise
                return
            if isinstance(record, Header) and number != part.number:
                return
            yield number, line, record


def _digest(values: Any) -> bytes:
    """Of the content of a line, however it is spelled."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _identity(record: Record) -> tuple[Any, ...]:
    """What a line is about; two lines of one run about the same must say the same."""
    match record:
        case TaskRecord():
            return ("task", record.workload)
        case CandidateRecord():
            return ("candidate", record.workload, record.key, record.round)
        case RoundRecord():
            return ("round", record.workload, record.round)
        case FinalRecord():
            return ("final", record.workload, record.key, record.candidates)
        case ClockRecord():
            return ("clock", record.workload, record.key, record.clock_mhz, record.confirmed)
    return ("header",)


class _Energies:
    """Energies of kernels by the way they were measured, to find those that disagree."""

    header: Header

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, bytes], tuple[float, float, Path, int]] = {}
        self._ways: dict[int, bytes] = {}

    def see(self, record: Record, path: Path, number: int) -> Problem | None:
        """A problem when the kernel's energy is known from another line, and is not the same."""
        measured = getattr(record, "measured", None)
        if not isinstance(record, CandidateRecord) or not isinstance(measured, EnergyMeasurement):
            return None
        identity = (record.workload, record.key, self._way())
        energy_j, stderr_j = measured.energy_j, measured.stderr_j
        if identity not in self._known:
            self._known[identity] = (energy_j, stderr_j, path, number)
            return None
        other_j, other_stderr_j, other_path, other_number = self._known[identity]
        error_j = math.hypot(stderr_j, other_stderr_j)
        if abs(energy_j - other_j) <= DISAGREE_SIGMA * error_j:
            return None
        return Problem(
            path,
            number,
            f"kernel {record.key} took {energy_j:.4g} J here and {other_j:.4g} J in {other_path}, "
            f"line {other_number}: more than {DISAGREE_SIGMA:g} standard errors apart; both kept",
            warning=True,
        )

    def _way(self) -> bytes:
        """A digest of how the present run measured."""
        header = self.header
        known = self._ways.get(id(header))
        if known is None:
            meter = header.meter or {}
            way = [
                header.plan,
                locked(header),
                *(meter.get(n) for n in ("meter", "method", "scope")),
            ]
            known = self._ways[id(header)] = _digest(way)
        return known


# -- the stock files -------------------------------------------------------------------------------


def _merge_stock(sources: Sequence[Path], output: Path, result: Merged) -> None:
    """Join the stock databases: workloads by their hash, tuning records by their content."""
    sources = [source for source in sources if (source / WORKLOAD_FILE).exists()]
    if not sources:
        return
    indices: dict[str, int] = {}
    positions: dict[Path, list[int]] = {}
    with new_file(output / WORKLOAD_FILE) as file:
        for source in sources:
            places = positions[source] = []
            for line, value in stock_values(source / WORKLOAD_FILE):
                if not is_workload(value):
                    continue
                if value[0] not in indices:
                    indices[value[0]] = len(indices)
                    file.write(line)
                places.append(indices[value[0]])
    result.workloads = len(indices)
    seen: set[bytes] = set()
    with new_file(output / TUNING_RECORD_FILE) as file:
        for source in sources:
            for _, value in stock_values(source / TUNING_RECORD_FILE):
                if not is_tuning_record(value):
                    continue
                value[0] = positions[source][value[0]]
                content = _digest(value)
                if content not in seen:
                    seen.add(content)
                    file.write(json.dumps(value, separators=(",", ":")) + "\n")
    result.tuning_records = len(seen)


def _merge_ansor(sources: Sequence[Path], output: Path, result: Merged) -> None:
    """Join the logs of legacy Ansor: each line once, by its content."""
    sources = [source for source in sources if (source / LOG_FILE).exists()]
    if not sources:
        return
    seen: set[bytes] = set()
    with new_file(output / LOG_FILE) as file:
        for source in sources:
            for _, _, line in read_log(source / LOG_FILE):
                content = _digest(parse_line(line, LONGEST_STOCK_LINE))
                if content not in seen:
                    seen.add(content)
                    file.write(line)
    result.ansor_records = len(seen)
