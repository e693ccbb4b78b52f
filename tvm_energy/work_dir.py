"""The work directory of a run: checked, locked, and mended after an interrupted run.

One process at a time writes to a work directory; a second one is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.json_lines import (
    LONGEST_STOCK_LINE,
    parse_line,
    read_lines,
    refuse_link_out,
    repair_tail,
)
from tvm_energy.records import FILE_NAME, Header, Record, kernel_key, read_records

WORKLOAD_FILE = "database_workload.json"
TUNING_RECORD_FILE = "database_tuning_record.json"
_LOCK_FILE = ".tvm_energy.lock"


@contextlib.contextmanager
def locked_work_dir(path: Path) -> Iterator[Path]:
    """Create the directory if needed and hold its lock.

    Raises:
        WorkDirError: it is a file, cannot be written, or another process uses it.
    """
    if path.exists() and not path.is_dir():
        raise WorkDirError(f"{path} is a file, not a directory; choose another --work-dir")
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as exc:
        raise WorkDirError(
            f"cannot write to {path}: {exc.strerror}; choose another --work-dir"
        ) from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
            raise WorkDirError(
                f"{path} is in use by another tuning run (process {owner}); "
                "wait for it or choose another --work-dir"
            ) from exc
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield path
    finally:
        os.close(descriptor)


def load(path: Path, device_uuid: str) -> list[Record]:
    """Mend what an interrupted run left torn, check the rest, and return the energy records.

    Args:
        path: a work directory whose lock is held.
        device_uuid: the device that is to be tuned for now.

    Raises:
        RecordFormatError: a broken line, named with file and line.
        WorkDirError: the records belong to another device, or a file is a link out of the directory.
    """
    for name in (WORKLOAD_FILE, TUNING_RECORD_FILE, FILE_NAME):
        try:
            repair_tail(path / name, LONGEST_STOCK_LINE)
        except OSError as exc:
            raise WorkDirError(
                f"cannot write {path / name}: {exc.strerror}; choose another --work-dir"
            ) from exc
    check_stock(path)
    file = path / FILE_NAME
    records = list(read_records(file)) if file.exists() else []
    for record in records:
        if isinstance(record, Header) and record.device.get("uuid") != device_uuid:
            raise WorkDirError(
                f"{path} belongs to device {record.device.get('name')!r} "
                f"({record.device.get('uuid')}), not to {device_uuid}; choose another --work-dir"
            )
    return records


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one line.

    Attributes:
        path, line: where; lines count from 1, and 0 is the file as a whole.
        reason: one sentence.
        warning: readers go on in spite of it.
    """

    path: Path
    line: int
    reason: str
    warning: bool = False

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return f"{where}: {self.reason}"


def check_stock(path: Path) -> None:
    """Refuse a stock database that TVM could not read; a torn last line is no reason.

    Raises:
        RecordFormatError: a broken line, named with file and line.
        WorkDirError: a file is a link out of the directory.
    """
    for name in (WORKLOAD_FILE, TUNING_RECORD_FILE):
        refuse_link_out(path / name)
    for problem in stock_problems(path):
        if not problem.warning:
            raise RecordFormatError(str(problem))


def stock_problems(path: Path) -> Iterator[Problem]:
    """What TVM would stumble over in its two files, without saying where."""
    workloads = 0
    for number, value in stock_lines(path / WORKLOAD_FILE):
        if isinstance(value, Problem):
            yield value
            continue
        workloads += 1
        if not is_workload(value):
            yield Problem(path / WORKLOAD_FILE, number, "not a workload")
    file = path / TUNING_RECORD_FILE
    for number, value in stock_lines(file):
        if isinstance(value, Problem):
            yield value
        elif not is_tuning_record(value):
            yield Problem(file, number, "not a tuning record")
        elif not 0 <= value[0] < workloads:
            yield Problem(
                file,
                number,
                f"names workload {str(value[0])[:40]}, but {WORKLOAD_FILE} holds {workloads}",
            )


def is_workload(value: Any) -> bool:
    """Whether a line's value is ``[structural hash, module]``."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], str)
    )


def is_tuning_record(value: Any) -> bool:
    """Whether a line's value is ``[workload, [trace, run_secs, target, arguments]]``."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is int
        and isinstance(value[1], list)
    )


def stock_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the lines of a stock file; a `Problem` for a broken one."""
    if not file.exists():
        return
    for number, line in read_lines(file, LONGEST_STOCK_LINE):
        try:
            yield number, parse_line(line, LONGEST_STOCK_LINE)
        except RecordFormatError as exc:
            yield number, Problem(file, number, str(exc), warning=not line.endswith(b"\n"))


def stock_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Text and values of the lines of a checked stock file; a torn last line is left out."""
    if not path.exists():
        return
    for _, line in read_lines(path, LONGEST_STOCK_LINE):
        try:
            value = parse_line(line, LONGEST_STOCK_LINE)
        except RecordFormatError:
            if line.endswith(b"\n"):
                raise
            return
        yield line.decode().rstrip("\n") + "\n", value


#: Attributes that TVM writes to a file as 0 or 1, though in the trace they are false or true; a key is
#: a hash of the latter.
_BOOLEAN_ATTRIBUTES = {"Split": (0, 1)}


def stock_key(record: Any) -> str:
    """Key of the kernel that a tuning record (`is_tuning_record`) is about; empty when it is not one.

    The same as the key that a search gives the kernel, found without TVM.
    """
    trace = record[1][0] if record[1] else None
    if not (isinstance(trace, list) and trace and isinstance(trace[0], list)):
        return ""
    return kernel_key([[_as_in_trace(item) for item in trace[0]], *trace[1:]])


def _as_in_trace(instruction: Any) -> Any:
    """``[name, inputs, attributes, outputs]`` with the booleans that were written as numbers."""
    if not (
        isinstance(instruction, list)
        and len(instruction) == 4
        and isinstance(instruction[0], str)
        and isinstance(instruction[2], list)
    ):
        return instruction
    booleans = _BOOLEAN_ATTRIBUTES.get(instruction[0], ())
    attributes = [
        bool(value) if index in booleans else value for index, value in enumerate(instruction[2])
    ]
    return [*instruction[:2], attributes, instruction[3]]
