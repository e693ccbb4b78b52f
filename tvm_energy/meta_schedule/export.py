"""A deployable extract of a run: a stock database with one kernel a workload, and a manifest.

::

    DIR/
        database_workload.json         stock MetaSchedule, the chosen kernels' workloads
        database_tuning_record.json    stock MetaSchedule, one record a workload
        manifest.json                  what was chosen, from where, and what to expect

Plain TVM deploys it (``ms.database.JSONDatabase(work_dir=DIR)``); tvm_energy is not needed there. The
lines are copied as they are.
"""

from __future__ import annotations

# compat comes first: it refuses a TVM / tvm-ffi pair that would crash.
import tvm_energy.meta_schedule.compat  # noqa: F401

# isort: split
import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.json_lines import parse_line
from tvm_energy.logs.load import record_file
from tvm_energy.manifest import FORMAT, FORMAT_VERSION, MANIFEST_FILE, read_manifest
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.meta_schedule.traces import trace_key
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    from_json,
    now,
)
from tvm_energy.replay import RunSummary, TaskSummary, summarize
from tvm_energy.stock_files import StockRecord, read_stock_records, read_workload_lines
from tvm_energy.version import __version__
from tvm_energy.work_dir import TUNING_RECORD_FILE, WORKLOAD_FILE

#: Workload, kernel, and the clock that is locked for it.
_Pair = tuple[str, str, "float | None"]


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Where the figures of a choice stand in the energy records."""

    line: int
    kind: str
    measured: EnergyMeasurement | None


def export(
    work_dir: Path | str,
    to: Path | str,
    *,
    objective: str | None = None,
    clock_choice: str | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write the chosen kernels of a run into a folder of their own.

    Args:
        work_dir: of a tuning run; only read.
        to: the new folder. Nothing is left there when the export fails.
        objective: chooses the kernels; by default that of the last run.
        clock_choice: ``default``, ``one`` or ``per-kernel``, see `tvm_energy.clock_choice`; by default as in
            the last run.
        replace: whether `to` may be an earlier export, which is then replaced.

    Returns:
        The manifest (see ``docs/deploy.md``).

    Raises:
        ConfigurationError: no such work directory, or `to` cannot be taken.
        WorkDirError: there is no kernel to export, or its schedule is missing.
        RecordFormatError: a broken line, named with file and line.
    """
    source, destination = Path(work_dir), Path(to)
    record_file(source)
    if not source.is_dir():
        raise ConfigurationError(f"{source} is a file; export needs the whole work directory")
    _check_destination(source, destination, replace)
    summary = summarize(source, objective, clock_choice)
    chosen = {task.workload: task for task in summary.tasks if task.best}
    if not chosen:
        raise WorkDirError(f"{source} has no kernel to export: no task has a result yet")
    keys = {workload: task.best.key for workload, task in chosen.items() if task.best}
    records = find_records(source, keys)
    for workload, task in chosen.items():
        if workload not in records:
            raise WorkDirError(
                f"the schedule of kernel {keys[workload]} of {task.name!r} is not in "
                f"{source / TUNING_RECORD_FILE}; was the file changed after the run?"
            )
    workloads = read_workload_lines(source)
    manifest = _manifest(source, summary, records)
    with _new_folder(destination) as folder:
        _write_lines(folder / WORKLOAD_FILE, (workloads[r.index][1] for r in records.values()))
        _write_lines(
            folder / TUNING_RECORD_FILE,
            (json.dumps([place, r.value]) for place, r in enumerate(records.values())),
        )
        (folder / MANIFEST_FILE).write_text(
            json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
    return manifest


def _check_destination(source: Path, destination: Path, replace: bool) -> None:
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ConfigurationError(f"{destination} is not a folder; choose another --to")
    resolved, work_dir = destination.resolve(), source.resolve()
    if resolved == work_dir or resolved in work_dir.parents:
        raise ConfigurationError(
            f"{destination} is or holds the work directory itself; choose another --to"
        )
    if not destination.exists() or not any(destination.iterdir()):
        return
    if read_manifest(destination) is None:
        raise ConfigurationError(
            f"{destination} is not empty and is no earlier export; choose another --to"
        )
    if not replace:
        raise ConfigurationError(
            f"{destination} holds an earlier export; give --force to replace it, or another --to"
        )
    strangers = {item.name for item in destination.iterdir()} - {
        MANIFEST_FILE,
        WORKLOAD_FILE,
        TUNING_RECORD_FILE,
    }
    if strangers:
        raise ConfigurationError(
            f"{destination} holds files that an export did not write, such as "
            f"{min(strangers)!r}; it is not replaced; choose another --to"
        )


def find_records(source: Path, keys: Mapping[str, str]) -> dict[str, StockRecord]:
    """The stock record of one kernel of each workload.

    Args:
        source: a work directory; only read.
        keys: workload hash -> key of the kernel.

    Returns:
        By workload, in the order of `keys`; kernels that are not in the file are left out.

    Raises:
        WorkDirError: a stock file is missing or cannot be read.
        RecordFormatError: naming file and line.
    """
    workloads = read_workload_lines(source)
    modules: dict[int, Any] = {}
    found: dict[str, StockRecord] = {}
    for record in read_stock_records(source, [name for name, _ in workloads]):
        if record.workload not in keys or record.workload in found:
            continue
        if record.index not in modules:
            modules[record.index] = _workload(workloads[record.index][1], source, record.index)
        trace = _tuning_record(record, modules[record.index], source).trace
        if trace_key(trace) == keys[record.workload]:
            found[record.workload] = record
    return {workload: found[workload] for workload in keys if workload in found}


def schedule_texts(source: Path, keys: Mapping[str, str]) -> dict[str, str]:
    """The schedules of kernels as readable Python, by workload hash; arguments as `find_records`."""
    workloads = read_workload_lines(source)
    texts = {}
    for workload, record in find_records(source, keys).items():
        module = _workload(workloads[record.index][1], source, record.index)
        texts[workload] = str(_tuning_record(record, module, source).trace)
    return texts


def _workload(line: str, source: Path, index: int) -> Any:
    from tvm.s_tir import meta_schedule as ms

    try:
        return ms.database.Workload.from_json(parse_line(line))
    except Exception as exc:
        raise RecordFormatError(
            f"{source / WORKLOAD_FILE}, line {index + 1}: TVM cannot read this workload"
        ) from exc


def _tuning_record(record: StockRecord, workload: Any, source: Path) -> Any:
    """A stock record as TVM's object.

    Raises:
        RecordFormatError: TVM cannot read it.
    """
    from tvm.s_tir import meta_schedule as ms

    try:
        return ms.database.TuningRecord.from_json(record.value, workload)
    except Exception as exc:
        raise RecordFormatError(
            f"{source / TUNING_RECORD_FILE}, line {record.line}: TVM cannot read this schedule"
        ) from exc


def _manifest(
    source: Path, summary: RunSummary, records: Mapping[str, StockRecord]
) -> dict[str, Any]:
    header = summary.header
    wanted = {
        (task.workload, task.best.key, task.best.clock_mhz): task.best.energy_j
        for task in summary.tasks
        if task.best
    }
    evidence = _find_evidence(record_file(source), wanted, header)
    clocks = {
        item.measured.clock_mhz
        for item in evidence.values()
        if item.measured and item.measured.clock_mhz is not None
    }
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "created": now(),
        "simulated": summary.simulated,
        "device": header.device,
        "driver": header.device.get("driver"),
        "meter": header.meter,
        "clocks_mhz": sorted(clocks),
        "clock_choice": summary.clock_choice,
        "objective": summary.objective,
        "policy": summary.policy,
        "plan": header.plan,
        "versions": header.versions | {"exported_by_tvm_energy": __version__},
        "source": str(source.resolve()),
        "totals": None if summary.totals is None else dataclasses.asdict(summary.totals),
        "kernels": [
            _kernel_entry(task, records[task.workload], evidence, source)
            for task in summary.tasks
            if task.best
        ],
        "without_kernel": [
            {"task": task.name, "workload": task.workload, "reason": task.reason}
            for task in summary.tasks
            if not task.best
        ],
    }


def _kernel_entry(
    task: TaskSummary,
    record: StockRecord,
    evidence: Mapping[_Pair, _Evidence],
    source: Path,
) -> dict[str, Any]:
    assert task.best is not None
    known = evidence.get((task.workload, task.best.key, task.best.clock_mhz))
    return {
        "task": task.name,
        "workload": task.workload,
        "weight": task.weight,
        "key": task.best.key,
        "latency_s": task.best.latency_s,
        "energy_j": task.best.energy_j,
        "energy_stderr_j": task.best.energy_stderr_j,
        "clock_mhz": task.best.clock_mhz,
        "measurement": known.measured.to_json() if known and known.measured else None,
        "fastest": None if task.fastest is None else dataclasses.asdict(task.fastest),
        "at_default": None if task.at_default is None else dataclasses.asdict(task.at_default),
        "ties": len(task.ties),
        "from": {
            "energy_record": _where(record_file(source), known.line if known else None),
            "energy_record_kind": known.kind if known else None,
            "tuning_record": _where(source / TUNING_RECORD_FILE, record.line),
        },
    }


def _where(path: Path, line: int | None) -> dict[str, Any]:
    return {"file": path.name, "line": line}


def _find_evidence(
    path: Path, wanted: Mapping[_Pair, float | None], header: Header
) -> dict[_Pair, _Evidence]:
    """The last line that gave each choice its figures: a final or one at a clock, else a candidate."""
    found: dict[_Pair, _Evidence] = {}
    same_plan = True
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            with contextlib.suppress(RecordFormatError):  # a torn last line; others were refused
                record = from_json(parse_line(line))
                if isinstance(record, Header):
                    same_plan = record.plan == header.plan
                if not isinstance(record, (CandidateRecord, FinalRecord, ClockRecord)):
                    continue
                clock_mhz = record.clock_mhz if isinstance(record, ClockRecord) else None
                name = (record.workload, record.key, clock_mhz)
                if name not in wanted:
                    continue
                measured = record.measured if same_plan else None
                fits = (measured.energy_j if measured else None) == wanted[name]
                if fits and (name not in found or not isinstance(record, CandidateRecord)):
                    found[name] = _Evidence(number, record.kind, measured)
    return found


@contextlib.contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    """A folder that takes its place only when it is complete."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as exc:
        raise WorkDirError(
            f"cannot write beside {destination}: {exc.strerror}; choose another --to"
        ) from exc
    try:
        yield folder
        folder.chmod(0o755)
        if destination.exists():
            for name in (MANIFEST_FILE, WORKLOAD_FILE, TUNING_RECORD_FILE):
                (destination / name).unlink(missing_ok=True)
            destination.rmdir()
        os.rename(folder, destination)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_lines(path: Path, lines: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
