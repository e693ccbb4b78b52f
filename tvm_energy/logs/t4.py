"""Kernel Tuner's T4 results format, to and from.

T4 (`results-schema.json`, version 1.0.0, of Kernel Tuner and of the Open Autotuning schema that it follows)
is one JSON object: ``schema_version`` and ``results``, of which each has a ``configuration``, ``times``
(milliseconds), ``invalidity``, ``correctness``, ``measurements`` (name, value, unit) and ``objectives``.

Writing: one result a candidate. What T4 has no place for goes to properties called ``tvm_energy``, which
other readers pass over; with them a file of ours turns back into the log without loss.

Reading a file of another tuner: a configuration becomes a kernel whose key is its hash, and the file one
run. An energy needs a measurement called ``energy`` or ``..._energy`` in joules. T4 says nothing of its
standard error, so that the error of the mean run time stands in, and ``quality`` says so.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tvm_energy.errors import RecordFormatError
from tvm_energy.json_lines import open_file, parse_line
from tvm_energy.logs.load import Log
from tvm_energy.logs.output import new_file
from tvm_energy.records import CandidateRecord, Header, Record, from_json, kernel_key, to_json

SCHEMA_VERSION = "1.0.0"
#: The longest file that is read: it is one JSON value and must fit into memory.
LONGEST_FILE = 2**29

_OURS = "tvm_energy"
_QUALITY = "from T4: the standard error is that of the run times alone"
_INVALID = {"build": "compile", "schedule": "constraints", "run": "runtime"}
_ERRORS = {
    "compile": "build: did not compile",
    "runtime": "run: failed",
    "timeout": "run: timeout",
    "correctness": "run: wrong result",
    "constraints": "schedule: violates the constraints",
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_JOULES = {"": 1.0, "J": 1.0, "mJ": 1e-3, "uJ": 1e-6, "µJ": 1e-6}


def write_t4(log: Log, path: Path) -> int:
    """Write a log as T4 results; returns how many results.

    Raises:
        ConfigurationError: the file exists.
        RecordFormatError: naming file and line of a broken line of the log.
    """
    tasks = log.tasks()
    others: list[dict[str, Any]] = []
    count = 0
    header = log.headers[0]
    with new_file(path) as file:
        file.write(f'{{"schema_version": "{SCHEMA_VERSION}", "results": [')
        for position, record in enumerate(log.records()):
            ours = {"position": position, "record": to_json(record)}
            if isinstance(record, Header):
                header = record
            if not isinstance(record, CandidateRecord):
                others.append(ours)
                continue
            task = tasks.get(record.workload)
            result = _result(record, task.task if task else record.workload, header) | {_OURS: ours}
            file.write(("," if count else "") + "\n" + json.dumps(result))
            count += 1
        file.write(f'\n], "{_OURS}": {json.dumps(others)}}}\n')
    return count


def _result(record: CandidateRecord, task: str, header: Header) -> dict[str, Any]:
    times: dict[str, Any] = {}
    measurements = []
    if record.latency_s is not None:
        times["runtimes"] = [1e3 * record.latency_s]
        measurements.append(_measurement("time", 1e3 * record.latency_s, "ms"))
    measured = record.measured
    if measured is not None:
        times["benchmark"] = 1e3 * measured.device_s
        measurements += [
            _measurement("energy", measured.energy_j, "J"),
            _measurement("energy_standard_error", measured.stderr_j, "J"),
            _measurement("power", measured.power_w, "W"),
        ]
        if measured.clock_mhz is not None:
            measurements.append(_measurement("core_freq", measured.clock_mhz, "MHz"))
        if measured.temperature_c is not None:
            measurements.append(_measurement("temperature", measured.temperature_c, "C"))
    if record.predicted_energy_j is not None:
        measurements.append(
            _measurement("predicted_energy_of_model", record.predicted_energy_j, "J")
        )
    return {
        "timestamp": _timestamp(header.created),
        "configuration": {"task": task, "workload": record.workload, "trace": record.key},
        "times": times,
        "invalidity": _invalidity(record),
        "correctness": 1,
        "measurements": measurements,
        "objectives": ["time" if header.objective == "latency" else "energy"],
    }


def _measurement(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def _timestamp(created: float) -> str:
    try:
        return datetime.fromtimestamp(created, tz=timezone.utc).isoformat(sep=" ")
    except (OverflowError, ValueError, OSError):
        return ""


def _invalidity(record: CandidateRecord) -> str:
    if record.latency_s is not None:
        return "correct"
    kind, _, reason = (record.error or "").partition(":")
    if kind == "run" and reason.strip().startswith("timeout"):
        return "timeout"
    return _INVALID.get(kind, "runtime")


# -- reading ---------------------------------------------------------------------------------------


def read_t4(path: Path, device: str = "unknown device") -> Iterator[Record]:
    """Records of a T4 results file.

    Args:
        path: the file.
        device: name of the device on which another tuner measured; T4 does not tell it.

    Raises:
        RecordFormatError: naming the file, and the result where it is one of them.
        WorkDirError: it is not a regular file.
    """
    with open_file(path) as file:
        data = file.read(LONGEST_FILE + 1)
    try:
        values = parse_line(data, LONGEST_FILE)
        if not isinstance(values, dict) or not isinstance(values.get("results"), list):
            raise RecordFormatError("no object with a list of results; not a T4 results file")
        version = values.get("schema_version")
        if not isinstance(version, str) or version.partition(".")[0] != "1":
            raise RecordFormatError(
                f"schema_version {str(version)[:40]!r} is not 1.x, which is read"
            )
    except RecordFormatError as exc:
        raise RecordFormatError(f"{path}: {exc}") from exc
    if _OURS in values:
        yield from _ours(path, values)
    else:
        yield from _foreign(path, values["results"], device)


def _ours(path: Path, values: Mapping[str, Any]) -> Iterator[Record]:
    """The log that a file of ours was written from, in its order."""
    lines = values[_OURS]
    items = [item.get(_OURS) for item in values["results"] if isinstance(item, dict)]
    items += lines if isinstance(lines, list) else []
    positions: dict[int, Any] = {}
    for item in items:
        if not isinstance(item, dict) or type(item.get("position")) is not int:
            raise RecordFormatError(f"{path}: a {_OURS!r} property is not one of ours")
        positions[item["position"]] = item.get("record")
    for position in sorted(positions):
        try:
            yield from_json(positions[position])
        except RecordFormatError as exc:
            raise RecordFormatError(f"{path}, position {str(position)[:40]}: {exc}") from exc


def _foreign(path: Path, results: list[Any], device: str) -> Iterator[Record]:
    candidates = []
    for number, item in enumerate(results, start=1):
        try:
            candidates.append(_candidate(item, path.stem))
        except RecordFormatError as exc:
            raise RecordFormatError(f"{path}, result {number}: {exc}") from exc
    energy = any(record.measured for record in candidates)
    meter = {"meter": "t4", "method": "t4", "scope": "gpu", "device_name": device}
    yield Header(
        device={"name": device, "uuid": f"t4:{device}", "driver": "", "simulated": False},
        meter=meter if energy else None,
        objective="energy" if energy else "latency",
        policy="all" if energy else "none",
        plan={},
        versions={"t4": SCHEMA_VERSION},
        seed=0,
        created=time.time(),
    )
    yield from candidates


def _candidate(item: Any, name: str) -> CandidateRecord:
    if not isinstance(item, dict) or not isinstance(item.get("configuration"), dict):
        raise RecordFormatError("has no configuration")
    times = item.get("times")
    runtimes = times.get("runtimes") if isinstance(times, dict) else None
    runtimes_s = [1e-3 * x for x in runtimes if _positive(x)] if isinstance(runtimes, list) else []
    invalidity = item.get("invalidity", "correct")
    values: dict[str, Any] = {
        "kind": CandidateRecord.kind,
        "workload": name,
        "key": kernel_key(item["configuration"]),
        "round": 0,
        "latency_s": None,
    }
    if invalidity != "correct":
        values["error"] = _ERRORS.get(str(invalidity), f"run: {str(invalidity)[:60]}")
    else:
        found = _measurements(item.get("measurements"))
        latency_s = found.get("time") or (statistics.fmean(runtimes_s) if runtimes_s else None)
        if latency_s is None:
            raise RecordFormatError("is correct, but has neither a measured time nor run times")
        values["latency_s"] = latency_s
        if "energy" in found:
            values["measured"] = _energy(found["energy"], latency_s, runtimes_s)
    record = from_json(values)
    assert isinstance(record, CandidateRecord)
    return record


def _measurements(items: Any) -> dict[str, float]:
    """Time in seconds and energy in joules, where they are among the measurements."""
    found: dict[str, float] = {}
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, dict) or not _positive(item.get("value")):
            continue
        name, unit = str(item.get("name")), str(item.get("unit", ""))
        if name == "time" and (unit or "ms") in _SECONDS:
            found.setdefault("time", item["value"] * _SECONDS[unit or "ms"])
        elif (name == "energy" or name.endswith("_energy")) and unit in _JOULES:
            found.setdefault("energy", item["value"] * _JOULES[unit])
    return found


def _energy(energy_j: float, latency_s: float, runtimes_s: list[float]) -> dict[str, Any]:
    count = len(runtimes_s)
    relative = 0.0
    if count > 1:
        relative = statistics.stdev(runtimes_s) / statistics.fmean(runtimes_s) / math.sqrt(count)
    return {
        "energy_j": energy_j,
        "stderr_j": relative * energy_j,
        "latency_s": latency_s,
        "launches": max(count, 1),
        "windows": 1,
        "window_s": math.fsum(runtimes_s),
        "sensor_updates": 0,
        "method": "t4",
        "meter": "t4",
        "scope": "gpu",
        "quality": _QUALITY,
    }


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-15 < value < 1e15
