"""Records as rows of a table: CSV, Parquet, and pandas for notebooks.

One row a record, one column a field. The fields of a measurement are ``measured.energy_j`` and so on;
free content (``device``, ``plan`` ...) and lists are JSON text. A table of all kinds has the column
``kind`` and can be turned back into the log without loss.

Spreadsheets execute text that begins with ``=``, ``+``, ``-`` or ``@``. In CSV files such text, empty text and text
that begins with an apostrophe get an apostrophe in front, which reading takes away again. An empty cell
is null.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.json_lines import LONGEST_LINE, open_file, parse_line
from tvm_energy.logs.load import Log
from tvm_energy.logs.output import new_file, new_path
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.records import (
    KINDS,
    Header,
    Record,
    Rule,
    from_json,
    rules_of,
    to_json,
)

if TYPE_CHECKING:
    import pandas

_MEASURED = "measured"
_COUNT = "measured.count"  # how many a round measured; ``measured`` itself is an object elsewhere
#: Rows that are written to Parquet at a time.
_BATCH = 50_000


def _columns_of(kind: str) -> dict[str, Rule]:
    """Columns of a kind of record, with the rules of their fields."""
    columns: dict[str, Rule] = {}
    for rule in rules_of(KINDS[kind]):
        if rule.type == "measurement":
            for inner in rules_of(EnergyMeasurement):
                columns[f"{_MEASURED}.{inner.name}"] = inner
        else:
            columns[_COUNT if rule.name == _MEASURED else rule.name] = rule
    return columns


_COLUMNS = {kind: _columns_of(kind) for kind in KINDS}
#: Of a table of all kinds. The same name has the same type everywhere.
ALL_COLUMNS: dict[str, Rule] = {
    name: rule for columns in _COLUMNS.values() for name, rule in columns.items()
}


def row_of(record: Record) -> dict[str, Any]:
    """A record as cells by column; null fields are None, free content and lists are JSON text."""
    row: dict[str, Any] = {"kind": record.kind}
    for name, value in to_json(record).items():
        if name == _MEASURED and isinstance(value, dict):
            row |= {f"{_MEASURED}.{inner}": _cell(item) for inner, item in value.items()}
        elif name == _MEASURED and isinstance(value, int):
            row[_COUNT] = value
        elif name != _MEASURED:
            row[name] = _cell(value)
    return row


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def record_of(row: dict[str, Any]) -> Record:
    """The inverse of `row_of`; columns that a kind does not have are ignored.

    Raises:
        RecordFormatError: it is not a row of ours.
    """
    kind = row.get("kind")
    columns = _COLUMNS.get(str(kind))
    if columns is None:
        raise RecordFormatError(f"unknown kind {str(kind)[:60]!r}; known are {', '.join(_COLUMNS)}")
    values: dict[str, Any] = {"kind": kind}
    measured: dict[str, Any] = {}
    for name, rule in columns.items():
        value = row.get(name)
        if isinstance(value, str) and rule.type in ("object", "names", "integer"):
            value = parse_line(value)  # an integer may have been too large for the table
        if name == _COUNT:
            values[_MEASURED] = value
        elif name.startswith(f"{_MEASURED}."):
            measured[rule.name] = value
        else:
            values[name] = value
    if kind != "round" and any(value is not None for value in measured.values()):
        values[_MEASURED] = measured
    return from_json(values)


# -- CSV -------------------------------------------------------------------------------------------


def write_csv(records: Iterable[Record], path: Path) -> int:
    """Write records as CSV; returns how many.

    Raises:
        ConfigurationError: the file exists.
    """
    count = 0
    with new_file(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", *ALL_COLUMNS])
        for record in records:
            count += 1
            row = row_of(record)
            writer.writerow([record.kind, *(_to_text(row.get(name)) for name in ALL_COLUMNS)])
    return count


def read_csv(path: Path) -> Iterator[Record]:
    """Records of a CSV file of ours.

    Raises:
        RecordFormatError: naming file and line.
        WorkDirError: it is not a regular file.
    """
    csv.field_size_limit(LONGEST_LINE)
    with open_file(path) as file:
        rows = csv.reader(_text_lines(file))
        try:
            names = next(rows, [])
            if "kind" not in names:
                raise RecordFormatError(
                    "the first line names no column 'kind'; not a table of ours"
                )
            for cells in rows:
                if len(cells) != len(names):
                    raise RecordFormatError(f"has {len(cells)} cells, but {len(names)} columns")
                yield record_of({n: _from_text(n, c) for n, c in zip(names, cells, strict=True)})
        except (RecordFormatError, csv.Error) as exc:
            raise RecordFormatError(f"{path}, line {rows.line_num}: {exc}") from exc


def _text_lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise RecordFormatError(f"the next line is longer than {LONGEST_LINE} bytes")
        try:
            yield line.decode()
        except UnicodeDecodeError as exc:
            raise RecordFormatError(f"the next line is not UTF-8 text ({exc.reason})") from exc


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    return f"'{value}" if not value or value[0] in "=+-@\t\r\n'" else value


def _from_text(name: str, text: str) -> Any:
    rule = ALL_COLUMNS.get(name)
    if text == "":
        return None
    if rule is not None and rule.type == "boolean":
        return {"true": True, "false": False}.get(text, text)
    if rule is not None and rule.type in ("number", "integer"):
        return parse_line(text)
    return text[1:] if text.startswith("'") else text


# -- Parquet and pandas ----------------------------------------------------------------------------


def write_parquet(records: Iterable[Record], path: Path) -> int:
    """Write records as Parquet; returns how many.

    Raises:
        ConfigurationError: the file exists, or pyarrow is not installed.
    """
    pyarrow, parquet = _pyarrow()
    schema = pyarrow.schema(
        [("kind", pyarrow.string())]
        + [(name, _arrow_type(pyarrow, rule)) for name, rule in ALL_COLUMNS.items()]
    )
    count = 0
    with new_path(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for rows in _batches(map(row_of, records)):
            count += len(rows)
            columns = [
                [_as(rule, row.get(name)) for row in rows]
                for name, rule in (("kind", None), *ALL_COLUMNS.items())
            ]
            arrays = [
                pyarrow.array(column, type=kind)
                for column, kind in zip(columns, schema.types, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
    return count


def read_parquet(path: Path) -> Iterator[Record]:
    """Records of a Parquet file of ours.

    Raises:
        RecordFormatError: naming file and row.
        ConfigurationError: pyarrow is not installed.
        WorkDirError: it is not a regular file.
    """
    pyarrow, parquet = _pyarrow()
    with open_file(path) as file:
        try:
            batches = parquet.ParquetFile(file).iter_batches(_BATCH)
            number = 0
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    try:
                        yield record_of(row)
                    except RecordFormatError as exc:
                        raise RecordFormatError(f"{path}, row {number}: {exc}") from exc
        except (pyarrow.ArrowException, OSError) as exc:
            raise RecordFormatError(
                f"{path} is not a Parquet file that can be read: {exc}"
            ) from exc


def dataframe(log: Log, kind: str) -> pandas.DataFrame:
    """See `Log.to_dataframe`."""
    if kind not in _COLUMNS:
        raise ConfigurationError(f"unknown kind {kind!r}; known are {', '.join(_COLUMNS)}")
    try:
        import pandas
    except ImportError as exc:
        raise ConfigurationError(
            "to_dataframe needs pandas: pip install 'tvm-energy[notebook]'"
        ) from exc
    columns: dict[str, list[Any]] = {name: [] for name in ("run", "name", *_COLUMNS[kind])}
    tasks = log.tasks()
    run = 0
    for record in log.records():
        run += isinstance(record, Header)
        if record.kind != kind:
            continue
        row = row_of(record)
        task = tasks.get(row.get("workload", ""))
        columns["run"].append(run)
        columns["name"].append(task.task if task else None)
        for name in _COLUMNS[kind]:
            columns[name].append(row.get(name))
    return pandas.DataFrame(
        {
            name: pandas.Series(values, dtype=_pandas_type(_COLUMNS[kind].get(name), name))
            for name, values in columns.items()
        }
    )


def _pandas_type(rule: Rule | None, name: str) -> str:
    if name == "run":
        return "int64"
    # Int64 and boolean have nulls of their own; seeds go beyond 64 bits with a sign.
    kinds = {"number": "float64", "integer": "Int64", "boolean": "boolean"}
    return "object" if rule is None or name == "seed" else kinds.get(rule.type, "object")


def _arrow_type(pyarrow: Any, rule: Rule) -> Any:
    return {
        "number": pyarrow.float64(),
        "integer": pyarrow.string() if rule.name == "seed" else pyarrow.int64(),
        "boolean": pyarrow.bool_(),
    }.get(rule.type, pyarrow.string())


def _as(rule: Rule | None, value: Any) -> Any:
    if rule is None or value is None:
        return value
    if rule.type == "number":
        return float(value)
    return str(value) if rule.name == "seed" else value


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'tvm-energy[notebook]'; CSV needs nothing more"
        ) from exc
    return pyarrow, pyarrow.parquet
