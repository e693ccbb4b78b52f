"""Logs as other formats, chosen by the names of the files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.json_lines import parse_line, read_lines
from tvm_energy.logs.load import Log
from tvm_energy.logs.output import new_file
from tvm_energy.logs.t4 import read_t4, write_t4
from tvm_energy.logs.table import read_csv, read_parquet, write_csv, write_parquet
from tvm_energy.records import FILE_NAME, Record, to_json

FORMATS = ("log", "t4", "csv", "parquet")


def convert(source: Path, output: Path, *, to: str | None = None, device: str | None = None) -> int:
    """Convert a log to another format, or a file of another format to a log.

    Args:
        source: a work directory, a record file, or a ``.csv``, ``.parquet`` or T4 ``.json`` file.
        output: the new file; a directory for a log.
        to: one of `FORMATS`; by default told by the output's name, where ``.json`` is T4.
        device: of a T4 file of another tuner, which does not tell it.

    Returns:
        How many records (T4: results) were written.

    Raises:
        ConfigurationError: the format is not known, the output exists, or a package is missing.
        WorkDirError, RecordFormatError: the source cannot be read; naming file and line.
    """
    to = to or {".csv": "csv", ".parquet": "parquet", ".json": "t4"}.get(output.suffix, "log")
    if to not in FORMATS:
        raise ConfigurationError(f"unknown format {to!r}; known are {', '.join(FORMATS)}")
    if not source.exists():
        raise ConfigurationError(f"{source} does not exist")
    if source.suffix == ".csv":
        log = Log.of(read_csv(source))
    elif source.suffix == ".parquet":
        log = Log.of(read_parquet(source))
    elif source.is_dir() or _is_log(source):
        log = Log.of(source)
    else:
        log = Log.of(read_t4(source, device or "unknown device"))
    if to == "t4":
        return write_t4(log, output)
    if to == "log":
        return _write_log(log.records(), output)
    return (write_csv if to == "csv" else write_parquet)(log.records(), output)


def _is_log(path: Path) -> bool:
    """Whether the first line is a record; the first of a T4 file is not."""
    for _, line in read_lines(path):
        try:
            return isinstance(parse_line(line), dict) and b'"results"' not in line
        except RecordFormatError:
            return False
    return False


def _write_log(records: Iterable[Record], output: Path) -> int:
    count = 0
    with new_file(output / FILE_NAME) as file:
        for record in records:
            file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
            count += 1
    return count
