"""The work directory of a run: checked, locked, and mended after an interrupted run.

One process at a time writes to a work directory; a second one is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.records import FILE_NAME, Header, Record, parse_line, read_records, repair_tail

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
        WorkDirError: the records belong to another device.
    """
    for name in (WORKLOAD_FILE, TUNING_RECORD_FILE, FILE_NAME):
        try:
            repair_tail(path / name)
        except OSError as exc:
            raise WorkDirError(
                f"cannot write {path / name}: {exc.strerror}; choose another --work-dir"
            ) from exc
    _check_stock_files(path)
    file = path / FILE_NAME
    records = list(read_records(file)) if file.exists() else []
    for record in records:
        if isinstance(record, Header) and record.device.get("uuid") != device_uuid:
            raise WorkDirError(
                f"{path} belongs to device {record.device.get('name')!r} "
                f"({record.device.get('uuid')}), not to {device_uuid}; choose another --work-dir"
            )
    return records


def _check_stock_files(path: Path) -> None:
    """Find a broken line before TVM does, which would not say where it is."""
    workloads = 0
    for number, value in _lines(path / WORKLOAD_FILE):
        workloads += 1
        if not (isinstance(value, list) and len(value) == 2):
            raise RecordFormatError(f"{path / WORKLOAD_FILE}, line {number}: not a workload")
    for number, value in _lines(path / TUNING_RECORD_FILE):
        file = path / TUNING_RECORD_FILE
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], list)):
            raise RecordFormatError(f"{file}, line {number}: not a tuning record")
        if not (isinstance(value[0], int) and 0 <= value[0] < workloads):
            raise RecordFormatError(
                f"{file}, line {number}: names workload {value[0]!r}, but {WORKLOAD_FILE} "
                f"holds {workloads}"
            )


def _lines(file: Path) -> Iterator[tuple[int, object]]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, parse_line(line)
            except RecordFormatError as exc:
                raise RecordFormatError(f"{file}, line {number}: {exc}") from exc
