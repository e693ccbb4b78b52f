"""The log of legacy Ansor in a work directory, read as text: no TVM needed, nothing executed.

A line of it holds, under ``"i"``, the task and the transform steps of one program. Their hashes are
the workload and the key in our energy records, so the two files are joined by what the line says, not by
its place; lines may be sorted, merged or taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tvm_energy.errors import RecordFormatError
from tvm_energy.json_lines import (
    LONGEST_STOCK_LINE,
    json_hash,
    parse_line,
    read_lines,
    refuse_link_out,
)
from tvm_energy.work_dir import TUNING_RECORD_FILE, Problem

#: Ansor's log in a work directory.
LOG_FILE = "ansor_record.json"


def is_ansor_only(work_dir: Path) -> bool:
    """Whether a work directory was tuned with Ansor and not with MetaSchedule."""
    return (work_dir / LOG_FILE).is_file() and not (work_dir / TUNING_RECORD_FILE).is_file()


def names_of_line(line: bytes | str) -> tuple[str, str]:
    """Workload and key of a line of an Ansor log.

    Raises:
        RecordFormatError: it is not such a line.
    """
    value = parse_line(line, LONGEST_STOCK_LINE)
    try:
        task, state = value["i"]
        return json_hash([task[0], task[1]]), json_hash(state[1])
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordFormatError("not a record of an Ansor log") from exc


def read_log(file: Path) -> Iterator[tuple[str, str, str]]:
    """Workload, key and text of each line of an Ansor log. A torn last line is left out.

    Raises:
        RecordFormatError: naming file and line.
        WorkDirError: the file is a link out of its directory.
    """
    for _, line in checked_lines(file):
        if not isinstance(line, Problem):
            yield line
        elif not line.warning:
            raise RecordFormatError(str(line))


def checked_lines(file: Path) -> Iterator[tuple[int, tuple[str, str, str] | Problem]]:
    """Numbers and `read_log` of the lines; a `Problem` for a broken one, a warning for a torn last one.

    Comments, which stock Ansor passes over, are left out, as are all lines of a file that is not there.
    """
    refuse_link_out(file)
    if not file.exists():
        return
    for number, line in read_lines(file, LONGEST_STOCK_LINE):
        if line.startswith(b"#"):
            continue
        try:
            workload, key = names_of_line(line)
        except RecordFormatError as exc:
            yield number, Problem(file, number, str(exc), warning=not line.endswith(b"\n"))
            continue
        yield number, (workload, key, line.decode().rstrip("\n") + "\n")


def check_log(work_dir: Path) -> None:
    """Refuse an Ansor log with a broken line; a torn last line is no reason.

    Raises:
        RecordFormatError, WorkDirError: see `read_log`.
    """
    for _ in read_log(work_dir / LOG_FILE):
        pass
