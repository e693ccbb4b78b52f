"""The two stock files of a work directory, read as text: no TVM needed, nothing executed.

``database_workload.json`` holds ``[structural hash, module]`` a line, ``database_tuning_record.json``
``[workload index, [trace, run_secs, target, arguments]]``. TVM aborts the process on some malformed
files, so what only has to be found or copied is handled here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.json_lines import parse_line
from tvm_energy.work_dir import TUNING_RECORD_FILE, WORKLOAD_FILE


@dataclass(frozen=True, slots=True)
class StockRecord:
    """One line of ``database_tuning_record.json``.

    Attributes:
        workload: structural hash of its workload.
        index: number of its workload, from 0: a line of ``database_workload.json``.
        line: its own line number, from 1.
        value: trace, run_secs, target, arguments.
    """

    workload: str
    index: int
    line: int
    value: list[Any]


def read_workload_lines(work_dir: Path) -> list[tuple[str, str]]:
    """Structural hash and whole line of each workload, in order.

    Raises:
        WorkDirError: the file is missing or cannot be read.
        RecordFormatError: naming file and line.
    """
    path = work_dir / WORKLOAD_FILE
    return [(str(value[0]), line) for _, line, value in _lines(path)]


def read_stock_records(work_dir: Path, workloads: list[str]) -> Iterator[StockRecord]:
    """The tuning records, in order. An unfinished last line is left out.

    Args:
        work_dir: where the file lies.
        workloads: structural hashes by index, from `read_workload_lines`.

    Raises:
        WorkDirError: the file is missing or cannot be read.
        RecordFormatError: naming file and line.
    """
    path = work_dir / TUNING_RECORD_FILE
    for number, _, (index, value) in _lines(path):
        whole = isinstance(index, int) and not isinstance(index, bool)
        if not (whole and 0 <= index < len(workloads)):
            raise RecordFormatError(
                f"{path}, line {number}: names workload {str(index)[:40]}, but {WORKLOAD_FILE} "
                f"holds {len(workloads)}"
            )
        if not (isinstance(value, list) and value):
            raise RecordFormatError(f"{path}, line {number}: not a tuning record")
        yield StockRecord(workloads[index], index, number, value)


def _lines(path: Path) -> Iterator[tuple[int, str, list[Any]]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                try:
                    value = parse_line(line)
                except RecordFormatError as exc:
                    if not line.endswith("\n"):
                        return  # a run was interrupted while it wrote
                    raise RecordFormatError(f"{path}, line {number}: {exc}") from exc
                if not (isinstance(value, list) and len(value) == 2):
                    raise RecordFormatError(f"{path}, line {number}: not a list of two values")
                yield number, line.rstrip("\n"), value
    except OSError as exc:
        raise WorkDirError(
            f"cannot read {path}: {exc.strerror}; the schedules of a run lie there"
        ) from exc
