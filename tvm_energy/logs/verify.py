"""Check every line of a log, and what lines say of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tvm_energy.ansor_log import LOG_FILE, checked_lines
from tvm_energy.errors import RecordFormatError
from tvm_energy.json_lines import read_lines, refuse_link_out
from tvm_energy.logs.load import device_name, record_file
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    LineReader,
    Record,
    RoundRecord,
)
from tvm_energy.work_dir import (
    TUNING_RECORD_FILE,
    WORKLOAD_FILE,
    Problem,
    is_workload,
    stock_lines,
    stock_problems,
)


@dataclass
class Counts:
    """What a check has seen.

    Attributes:
        lines: lines by kind.
        errors, warnings: problems that make readers stop, and others.
    """

    lines: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    warnings: int = 0


def verify(source: Path, counts: Counts) -> Iterator[Problem]:
    """Problems of a work directory or a record file, in the order of its lines.

    A work directory's stock files and Ansor's log are checked too, as far as that goes without TVM.

    Args:
        source: only read, and line by line.
        counts: filled on the way.

    Raises:
        ConfigurationError, WorkDirError: there is nothing to check.
    """
    path = record_file(source)
    for problem in _problems(source, path, counts):
        counts.warnings += problem.warning
        counts.errors += not problem.warning
        yield problem


def _problems(source: Path, path: Path, counts: Counts) -> Iterator[Problem]:
    known: set[str] | None = None
    programs: dict[tuple[str, str], int] = {}
    if source.is_dir():
        for name in (WORKLOAD_FILE, TUNING_RECORD_FILE):
            refuse_link_out(source / name)
        yield from stock_problems(source)
        if (source / WORKLOAD_FILE).exists():
            lines = stock_lines(source / WORKLOAD_FILE)
            known = {value[0] for _, value in lines if is_workload(value)}
        for number, found in checked_lines(source / LOG_FILE):
            if isinstance(found, Problem):
                yield found
            else:
                programs.setdefault(found[:2], number)
    check = _Check(known, programs if source.is_dir() and (source / LOG_FILE).exists() else None)
    reader = LineReader(path)
    for number, line in read_lines(path):
        try:
            record = reader.read(number, line)
        except RecordFormatError as exc:
            reason = str(exc).removeprefix(f"{path}, line {number}: ")
            if line.endswith(b"\n"):
                yield Problem(path, number, reason)
            else:
                yield Problem(path, number, f"torn: a run was interrupted ({reason})", warning=True)
            continue
        counts.lines[record.kind] += 1
        for reason, warning in check.see(record):
            yield Problem(path, number, reason, warning)
    if not counts.lines:
        yield Problem(path, 0, "holds no records")
    for number in check.without_record():
        yield Problem(source / LOG_FILE, number, "the program of no energy record", warning=True)


class _Check:
    """What a line must agree with in the lines before it.

    Args:
        known: workload hashes of the stock database, None without one.
        programs: lines of Ansor's log by workload and key, None without one.
    """

    def __init__(self, known: set[str] | None, programs: dict[tuple[str, str], int] | None) -> None:
        self._known = known
        self._programs = programs
        self._of_ansor = {workload for workload, _ in programs or ()}
        self._header: Header | None = None
        self._keys: dict[str, set[str]] = {}
        self._since_round: Counter[str] = Counter()
        self._measured_since_round: Counter[str] = Counter()
        self._unknown: set[str] = set()

    def see(self, record: Record) -> Iterator[tuple[str, bool]]:
        """Reasons, each with whether it is only a warning."""
        if isinstance(record, Header):
            if self._header is not None and _device(record) != _device(self._header):
                yield (
                    f"a run of another device ({_device(record)}) than before "
                    f"({_device(self._header)})",
                    False,
                )
            self._header = record
            self._since_round.clear()
            self._measured_since_round.clear()
            return
        workload = record.workload
        if self._known is not None and workload not in self._known | self._of_ansor | self._unknown:
            self._unknown.add(workload)
            yield f"workload {workload[:40]} is not in {WORKLOAD_FILE}", True
        if isinstance(record, CandidateRecord):
            yield from self._candidate(record)
        elif isinstance(record, RoundRecord):
            yield from self._round(record)
        elif isinstance(record, (FinalRecord, ClockRecord)):
            if record.key not in self._keys.get(workload, ()):
                yield (
                    f"{record.kind} of kernel {record.key[:40]}, which no line before it tried",
                    True,
                )
            yield from self._simulated(record)

    def without_record(self) -> Iterator[int]:
        """Numbers of the lines of Ansor's log that are about no kernel seen."""
        for (workload, key), number in (self._programs or {}).items():
            if key not in self._keys.get(workload, ()):
                yield number

    def _candidate(self, record: CandidateRecord) -> Iterator[tuple[str, bool]]:
        if not record.key:
            return
        self._keys.setdefault(record.workload, set()).add(record.key)
        if (
            self._programs is not None
            and record.workload not in (self._known or ())
            and (record.workload, record.key) not in self._programs
        ):
            yield f"kernel {record.key[:40]} is not in {LOG_FILE}", True
        self._since_round[record.workload] += 1
        self._measured_since_round[record.workload] += record.measured is not None
        if record.measured is not None and record.latency_s is None:
            yield "has a measured energy but no latency", True
        if record.latency_s is None and record.error is None:
            yield "has neither a latency nor the reason why", True
        yield from self._simulated(record)

    def _round(self, record: RoundRecord) -> Iterator[tuple[str, bool]]:
        tried = self._since_round.pop(record.workload, 0)
        measured = self._measured_since_round.pop(record.workload, 0)
        if (tried, measured) != (record.candidates, record.measured):
            yield (
                f"round {record.round} says {record.candidates} candidates and {record.measured} "
                f"measurements, but the lines before it hold {tried} and {measured}",
                True,
            )

    def _simulated(
        self, record: CandidateRecord | FinalRecord | ClockRecord
    ) -> Iterator[tuple[str, bool]]:
        if record.measured is None or self._header is None:
            return
        if record.measured.simulated and not self._header.device.get("simulated"):
            yield "is simulated, but the header does not say so", True
        elif not record.measured.simulated and self._header.device.get("simulated"):
            yield "is said to be real on a simulated device", True


def _device(header: Header) -> str:
    return f"{device_name(header)}, {header.device.get('uuid')}"
