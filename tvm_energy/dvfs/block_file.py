"""Tables of blocks over clocks from a CSV or JSON file: one row for each block at each clock.

    block, clock_mhz, latency_ms, power_w [or energy_mj] [, output_bytes, server_ms]

The unit stands in the column's name, and nothing is guessed. JSON is a list of such rows, or an object with
that list under ``rows``. Rows of the same block and clock are averaged. ``output_bytes`` (the tensor
after the block) and ``server_*`` (its latency on the server) are for partitioning and the same
in all rows of a block. Without ``block`` the table is one block.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.dvfs.clock_table import ClockTable, clock_table
from tvm_energy.errors import ConfigurationError
from tvm_energy.spelling import listing

__all__ = ["BlockFile", "read_block_file", "read_rows"]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Column without its unit -> (our name, unit -> factor).
_QUANTITIES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "clock": ("clock", {"mhz": 1.0, "ghz": 1e3, "khz": 1e-3, "hz": 1e-6}),
    "latency": ("latency", _SECONDS),
    "time": ("latency", _SECONDS),
    "energy": ("energy", {"j": 1.0, "mj": 1e-3, "uj": 1e-6, "kj": 1e3}),
    "power": ("power", {"w": 1.0, "mw": 1e-3, "kw": 1e3}),
    "output": ("output", {"bits": 1.0, "bytes": 8.0, "kb": 8e3, "mb": 8e6}),
    "server": ("server", _SECONDS),
    "deadline": ("deadline", _SECONDS),
    "max_power": ("max_power", {"w": 1.0, "mw": 1e-3}),
    "gain": ("gain", {"db": 1.0}),
}


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A table, and for partitioning the bits after and the server's seconds of each block, or None."""

    table: ClockTable
    output_bits: NDArray[np.float64] | None
    server_s: NDArray[np.float64] | None


def read_block_file(path: Path) -> BlockFile:
    """Read a table of blocks.

    Raises:
        ConfigurationError: no such file, not a table, a column missing or without a unit, a value
            that is no number, or a block that lacks a clock which another has.
    """
    rows = read_rows(path, ("clock", "latency"))
    power = "power" in rows[0]
    if power == ("energy" in rows[0]):
        raise ConfigurationError(
            f"{path} needs a column of energy (energy_j, energy_mj) or of power (power_w), one of them"
        )
    values: dict[str, dict[float, list[tuple[float, float]]]] = {}
    extra: dict[str, dict[str, float]] = {"output": {}, "server": {}}
    for row in rows:
        name = str(row.get("block", "all"))
        pair = (row["latency"], row["power"] * row["latency"] if power else row["energy"])
        values.setdefault(name, {}).setdefault(row["clock"], []).append(pair)
        for kind, known in extra.items():
            if kind in row and known.setdefault(name, row[kind]) != row[kind]:
                raise ConfigurationError(f"{path}: rows of block {name!r} differ in {kind}")
    clocks = sorted({clock for own in values.values() for clock in own})
    for name, own in values.items():
        missing = [clock for clock in clocks if clock not in own]
        if missing:
            raise ConfigurationError(
                f"{path}: block {name!r} has no row at {missing[0]:g} MHz, where other blocks have "
                "one; measure it, or leave that clock out for all"
            )
    mean = np.array([[np.mean(own[clock], axis=0) for clock in clocks] for own in values.values()])
    table = clock_table(clocks, mean[..., 0], energy_j=mean[..., 1], blocks=tuple(values))
    return BlockFile(table, *(_per_block(known, values) for known in extra.values()))


def _per_block(known: Mapping[str, float], names: Mapping[str, Any]) -> NDArray[np.float64] | None:
    return np.array([known[name] for name in names]) if len(known) == len(names) else None


def read_rows(path: Path, required: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows in base units (MHz, s, J, W, bits, dB) under names without unit; ``block``, ``name`` as text."""
    rows = _raw_rows(path)
    converted = [_convert(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    for name in required:
        if any(name not in row for row in converted):
            units = next(units for known, units in _QUANTITIES.values() if known == name)
            raise ConfigurationError(
                f"{path} has no column for {name}; name it with its unit, one of "
                f"{listing(f'{name}_{unit}' for unit in units)}; its columns are {listing(rows[0])}"
            )
    return converted


def _raw_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigurationError(f"{path} does not exist; give a CSV or JSON table")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not a text file") from error
    if path.suffix.lower() == ".json":
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not JSON: {error}") from error
        rows = content.get("rows") if isinstance(content, dict) else content
    else:
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        rows = list(reader)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigurationError(f"{path} holds no rows; see docs/partition.md for the format")
    return rows


def _convert(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for column, value in row.items():
        key = str(column).strip().lower()
        if column is None:
            raise ConfigurationError(f"{where} has more values than columns")
        if key in ("block", "name"):
            converted[key] = str(value)
            continue
        stem, _, unit = key.rpartition("_")
        if key in _QUANTITIES:
            units = listing(f"{key}_{unit}" for unit in _QUANTITIES[key][1])
            raise ConfigurationError(f"{where}: column {column!r} has no unit; use one of {units}")
        if stem not in _QUANTITIES:
            continue
        name, units_of = _QUANTITIES[stem]
        if unit not in units_of:
            raise ConfigurationError(
                f"{where}: unit {unit!r} of column {column!r} is not known; use one of "
                f"{listing(f'{stem}_{unit}' for unit in units_of)}"
            )
        converted[name] = _number(value, f"{where}, column {column!r}") * units_of[unit]
    return converted


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{where}: {value!r} is not a number")
    return number
