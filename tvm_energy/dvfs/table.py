"""Reads tables of measurements over the clock: any CSV or JSON with clock, time, and power or energy.

Columns are found by their names, units by the end of the name (``time_ms``, ``Energy [mJ]``), else given,
else told from the values where these can tell; what was taken for what is said in `Table.reading`. Repeats of
a clock are averaged, and their scatter becomes the noise of the fit.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tvm_energy.dvfs.forms import Array
from tvm_energy.errors import ConfigurationError, RecordFormatError

#: Units that are understood, by quantity: factor to the unit of this package.
UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "clock": {"mhz": 1.0, "hz": 1e-6, "khz": 1e-3, "ghz": 1e3},
        "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
        "power": {"w": 1.0, "mw": 1e-3, "kw": 1e3},
        "energy": {"j": 1.0, "mj": 1e-3, "uj": 1e-6, "kj": 1e3},
    }
)
BASE_UNIT = MappingProxyType({"clock": "MHz", "time": "s", "power": "W", "energy": "J"})

#: Names of columns without their unit, the likelier first.
_NAMES = {
    "effective": ("effective_clock", "core_freq", "observed_clock", "measured_clock"),
    "clock": (
        "clock",
        "frequency",
        "freq",
        "core_clock",
        "sm_clock",
        "gpu_clock",
        "graphics_clock",
        "nvml_gr_clock",
        "requested_clock",
        "core",
        "f",
    ),
    "time": ("time", "latency", "elapsed_time", "duration", "runtime", "t"),
    "power": ("power", "average_power", "nvml_power", "mean_power", "p"),
    "energy": ("energy", "ps_energy", "e"),
}

#: A power in watts that no device of this kind has: the unit must be another.
_POWER_RANGE_W = (0.05, 5000.0)

#: Neighbouring clocks whose times differ by more: one of them is in another unit.
_MOST_JUMP = 100.0

#: Energy over power x time beyond this: the units do not fit together.
_MOST_MISFIT = 1.3

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One workload over the clock.

    Attributes:
        name: the values of the grouping columns; empty without them.
        clock_mhz: requested clocks, ascending, all different, shape (n,).
        effective_mhz: clocks that the device ran at, shape (n,); the requested where no column says.
        latency_s: shape (n,).
        power_w: shape (n,); None when the table has neither power nor energy.
        repeats: measurements averaged at each clock, shape (n,).
        latency_noise, power_noise: relative standard error of the mean at one clock, median over the clocks;
            0 when nothing was repeated.
    """

    name: str
    clock_mhz: Array
    effective_mhz: Array
    latency_s: Array
    power_w: Array | None
    repeats: Array
    latency_noise: float = 0.0
    power_noise: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it was understood.

    Attributes:
        series: one for each workload.
        reading: for people: which column is what, in which unit, and how that is known.
    """

    series: tuple[Series, ...]
    reading: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    unit: str
    factor: float
    known_by: str


def read_table(
    path: str | Path,
    *,
    columns: Mapping[str, str] = MappingProxyType({}),
    units: Mapping[str, str] = MappingProxyType({}),
    by: Sequence[str] = (),
) -> Table:
    """Read a CSV or JSON file (also with ``.xz`` behind).

    JSON may be a list of objects, an object of equally long lists, or an object that holds either under
    ``rows`` or (files of Kernel Tuner) ``cache``.

    Args:
        path: the file.
        columns: names of columns by ``clock``, ``effective``, ``time``, ``power``, ``energy``; only those that
            would not be found by themselves.
        units: units by the same names: MHz, ms, mW, J, ...
        by: columns that tell workloads apart.

    Raises:
        ConfigurationError: a column is missing, a unit unknown, or units contradict each other.
        RecordFormatError: the file is no such table, or a value cannot be a measurement.
    """
    path = Path(path)
    rows, own_units = _rows(path)
    return parse_rows(rows, str(path), columns=columns, units={**own_units, **units}, by=by)


def parse_rows(
    rows: Sequence[Row],
    source: str,
    *,
    columns: Mapping[str, str] = MappingProxyType({}),
    units: Mapping[str, str] = MappingProxyType({}),
    by: Sequence[str] = (),
) -> Table:
    """As `read_table`, from rows in memory; ``source`` names them in messages."""
    if not rows:
        raise RecordFormatError(f"{source}: the table has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in by:
        if name not in names:
            raise ConfigurationError(
                f"{source}: no column is called {name!r}; there are {', '.join(names)}"
            )
    found = {
        what: column
        for what in _NAMES
        if (column := _find_column(what, names, columns, by, source)) is not None
    }
    if "clock" not in found and "effective" in found:
        found["clock"] = found["effective"]
    for what in ("clock", "time"):
        if what not in found:
            raise ConfigurationError(
                f"{source}: no column was recognised as {what}; there are {', '.join(names)}. "
                f"Name it with --{what} COLUMN"
            )
    numbers = {what: _numbers(rows, name, source) for what, name in found.items()}
    reading = _units(found, numbers, units, source)
    values = {what: numbers[what] * reading[what].factor for what in found}
    _check_consistent(values, reading, source)
    if "power" not in values and "energy" in values:
        values["power"] = values["energy"] / values["time"]
    keys = [", ".join(str(row.get(name, "")) for name in by) for row in rows]
    series = tuple(
        _series(key, np.array([item == key for item in keys]), values, source)
        for key in dict.fromkeys(keys)
    )
    lines = [
        f"{what}: column {column.name!r} in {column.unit} ({column.known_by})"
        for what, column in reading.items()
    ]
    repeated = sum(int((one.repeats > 1).sum()) for one in series)
    if repeated:
        lines.append(f"{repeated} clocks are there more than once; their values were averaged")
    return Table(series=series, reading=tuple(lines))


# ---- the file -------------------------------------------------------------------------------------


def _rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows, and units that the format prescribes."""
    if not path.is_file():
        raise ConfigurationError(
            f"{path} is no file; give a CSV or JSON table with clock, time, and power or energy columns"
        )
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8-sig")
    except (UnicodeDecodeError, lzma.LZMAError) as exc:
        raise RecordFormatError(f"{path}: not a text file ({exc})") from exc
    if path.name.removesuffix(".xz").endswith(".json") or text.lstrip()[:1] in ("{", "["):
        parsed = _json_rows(text, path)
        # Kernel Tuner writes milliseconds, without a word.
        kernel_tuner = bool(parsed) and {"compile_time", "benchmark_time"} <= parsed[0].keys()
        return parsed, {"time": "ms"} if kernel_tuner else {}
    try:
        dialect: Any = csv.Sniffer().sniff(text[:4096], delimiters=",;\t")
    except csv.Error:
        dialect = csv.excel
    rows: list[Any] = [
        row for row in csv.DictReader(io.StringIO(text), dialect=dialect) if any(row.values())
    ]
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise RecordFormatError(f"{path}:{number}: not as many fields as the header has")
    return [{name.strip(): value for name, value in row.items()} for row in rows], {}


def _json_rows(text: str, path: Path) -> list[Row]:
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise RecordFormatError(f"{path}: not valid JSON ({exc})") from exc
    for key in ("rows", "cache"):
        if isinstance(values, dict) and isinstance(values.get(key), dict | list):
            inner = values[key]
            if isinstance(inner, list) or all(isinstance(item, dict) for item in inner.values()):
                values = list(inner.values()) if isinstance(inner, dict) else inner
                break
    if isinstance(values, dict):
        lists = {name: item for name, item in values.items() if isinstance(item, list)}
        if len({len(item) for item in lists.values()}) != 1:
            raise RecordFormatError(
                f"{path}: an object must hold equally long lists, one for each column"
            )
        values = [dict(zip(lists, item, strict=True)) for item in zip(*lists.values(), strict=True)]
    if not isinstance(values, list) or not all(isinstance(row, dict) for row in values):
        raise RecordFormatError(f"{path}: expected a list of objects, one for each row")
    return values


# ---- columns and units ----------------------------------------------------------------------------


def _split(name: str) -> tuple[str, str]:
    """``Energy [mJ]`` -> (``energy``, ``mj``); no unit is an empty one."""
    text = name.strip().lower()
    match = re.fullmatch(r"(.*?)[\s_]*[\[(]\s*([a-zµ]+)\s*[\])]", text)
    if match is None:
        match = re.fullmatch(r"(.+?)[\s_]+([a-zµ]+)", text)
    if match and any(match[2] in known for known in UNITS.values()):
        return re.sub(r"\W+", "_", match[1]), match[2]
    return re.sub(r"\W+", "_", text), ""


def _find_column(
    what: str, names: Sequence[str], given: Mapping[str, str], by: Sequence[str], source: str
) -> str | None:
    if what in given:
        if given[what] not in names:
            raise ConfigurationError(
                f"{source}: no column is called {given[what]!r}; there are {', '.join(names)}"
            )
        return given[what]
    taken = {*given.values(), *by}
    for wanted in _NAMES[what]:
        for name in names:
            base, unit = _split(name)
            fits = not unit or unit in UNITS["clock" if what == "effective" else what]
            if name not in taken and base == wanted and fits:
                return name
    return None


def _numbers(rows: Sequence[Row], name: str, source: str) -> Array:
    """A column as positive numbers."""
    values = []
    for number, row in enumerate(rows, start=1):
        value = row.get(name)
        try:
            if isinstance(value, bool) or value is None:
                raise ValueError
            one = float(value)
        except (TypeError, ValueError):
            raise RecordFormatError(
                f"{source}: row {number}: {name} is {value!r}, not a number"
            ) from None
        if not (math.isfinite(one) and one > 0):
            raise RecordFormatError(
                f"{source}: row {number}: {name} is {one:g}; clocks, times, powers and energies must "
                "be positive. Remove the row if the measurement failed"
            )
        values.append(one)
    return np.array(values)


def _units(
    found: Mapping[str, str], numbers: Mapping[str, Array], given: Mapping[str, str], source: str
) -> dict[str, _Column]:
    """The unit of each column: given, in its name, told by the values, else assumed."""
    result: dict[str, _Column] = {}
    for what, name in found.items():
        kind = "clock" if what == "effective" else what
        known = UNITS[kind]
        unit, known_by = _split(name)[1], "its name says so"
        if what in given:
            unit, known_by = given[what].lower(), "as given"
            if unit not in known:
                raise ConfigurationError(
                    f"{given[what]!r} is no unit of {what}; use {', '.join(known)}"
                )
        elif not unit:
            unit, known_by = _guess(kind, numbers[what])
        result[what] = _Column(name, _pretty(kind, unit), known[unit], known_by)
    _guess_together(result, numbers)
    return result


def _guess(kind: str, values: Array) -> tuple[str, str]:
    middle = float(np.median(values))
    if kind == "clock":
        for unit, limit in (("ghz", 10.0), ("mhz", 2e4), ("khz", 2e7)):
            if middle < limit:
                return unit, "told by the values"
        return "hz", "told by the values"
    if kind == "power" and middle > _POWER_RANGE_W[1]:
        return "mw", "told by the values"
    return BASE_UNIT[kind].lower(), "assumed"


def _guess_together(columns: dict[str, _Column], numbers: Mapping[str, Array]) -> None:
    """Where units of time, power or energy are only assumed, take those that fit together."""
    if "energy" not in columns:
        return
    open_ones = [
        what
        for what in ("time", "energy")
        if what in columns and columns[what].known_by == "assumed"
    ]
    if not open_ones:
        return
    best: tuple[float, dict[str, str]] | None = None
    for time in ("s", "ms", "us") if "time" in open_ones else ("",):
        for energy in ("j", "mj") if "energy" in open_ones else ("",):
            t = UNITS["time"][time] if time else columns["time"].factor
            e = UNITS["energy"][energy] if energy else columns["energy"].factor
            power = float(np.median(numbers["energy"] * e / (numbers["time"] * t)))
            if "power" in columns:
                misfit = abs(
                    math.log(power / float(np.median(numbers["power"] * columns["power"].factor)))
                )
            else:
                low, high = _POWER_RANGE_W
                misfit = 0.0 if low <= power <= high else abs(math.log(power / 100))
            misfit += 1e-6 * ((time not in ("", "s")) + (energy not in ("", "j")))
            if best is None or misfit < best[0]:
                best = misfit, {"time": time, "energy": energy}
    assert best is not None
    for what, unit in best[1].items():
        if unit and unit != BASE_UNIT[what].lower():
            columns[what] = _Column(
                columns[what].name,
                _pretty(what, unit),
                UNITS[what][unit],
                "told by energy over time",
            )


def _pretty(kind: str, unit: str) -> str:
    return {"mhz": "MHz", "khz": "kHz", "ghz": "GHz", "hz": "Hz"}.get(
        unit, unit if kind == "time" else unit[:-1] + unit[-1].upper()
    )


def _check_consistent(
    values: Mapping[str, Array], columns: Mapping[str, _Column], source: str
) -> None:
    if "power" in values and "energy" in values:
        ratio = float(np.median(values["energy"] / (values["power"] * values["time"])))
        if not 1 / _MOST_MISFIT < ratio < _MOST_MISFIT:
            told = ", ".join(
                f"{what} in {columns[what].unit}" for what in ("time", "power", "energy")
            )
            raise ConfigurationError(
                f"{source}: energy is {ratio:.3g} times power x time with {told}: the units do not fit "
                "together. Give them with --time-unit, --power-unit, --energy-unit"
            )
    elif "energy" in values or "power" in values:
        power = values.get("power", values.get("energy", np.ones(1)) / values["time"])
        middle = float(np.median(power))
        if not _POWER_RANGE_W[0] <= middle <= _POWER_RANGE_W[1]:
            what = "power" if "power" in values else "energy"
            raise ConfigurationError(
                f"{source}: the power would be {middle:.3g} W with time in {columns['time'].unit} and "
                f"{what} in {columns[what].unit}; give the right --time-unit or --{what}-unit"
            )


# ---- series ---------------------------------------------------------------------------------------


def _series(name: str, chosen: Any, values: Mapping[str, Array], source: str) -> Series:
    clock = values["clock"][chosen]
    different, where = np.unique(clock, return_inverse=True)
    label = f"{source}: {name}" if name else source
    if len(different) < 2:
        raise ConfigurationError(
            f"{label}: all rows are at one clock, {different[0]:g} MHz; latency and power over the clock "
            "need two clocks at least, better five"
        )
    groups = [np.flatnonzero(where == index) for index in range(len(different))]
    latency = values["time"][chosen]
    means = np.array([latency[group].mean() for group in groups])
    jump = np.maximum(means[1:] / means[:-1], means[:-1] / means[1:]) / (
        different[1:] / different[:-1]
    )
    if jump.max() > _MOST_JUMP:
        at = int(np.argmax(jump))
        raise ConfigurationError(
            f"{label}: from {different[at]:g} to {different[at + 1]:g} MHz the time changes by a factor "
            f"of {jump.max():.3g}; are there rows in another unit?"
        )
    power = values["power"][chosen] if "power" in values else None
    effective = values.get("effective", values["clock"])[chosen]
    return Series(
        name=name,
        clock_mhz=different,
        effective_mhz=np.array([effective[group].mean() for group in groups]),
        latency_s=means,
        power_w=None
        if power is None
        else np.array([(power * latency)[group].mean() for group in groups]) / means,
        repeats=np.array([float(len(group)) for group in groups]),
        latency_noise=_noise(latency, groups),
        power_noise=0.0 if power is None else _noise(power, groups),
    )


def _noise(values: Array, groups: Iterable[Any]) -> float:
    """Median over the clocks of the relative standard error of their mean."""
    errors = [
        float(values[group].std(ddof=1) / values[group].mean() / math.sqrt(len(group)))
        for group in groups
        if len(group) > 1
    ]
    return float(np.median(errors)) if errors else 0.0
