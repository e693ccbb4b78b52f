"""Make a log small: of each task the kernels that can still be chosen, and the lines that tell of them.

Kept are the fastest kernel, the choices under the stock objectives, under those of the runs and under one
that the caller names, their ties, the finalists, the Pareto front of latency and measured energy, and the
best few of each of these objectives. So ranking a pruned log gives what ranking the whole log gave.
Rounds and failed candidates go; decisions can no longer be replayed, and a run that continues in a pruned
directory may try a dropped kernel again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tvm_energy.ansor_log import LOG_FILE, check_log, read_log
from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.json_lines import parse_line, read_lines
from tvm_energy.logs.load import Log, filtered, record_file
from tvm_energy.logs.output import new_file, refuse_existing
from tvm_energy.objective import Objective, parse_objective
from tvm_energy.ranking import Kernel, choose, costs, kernels_by_workload
from tvm_energy.records import (
    FILE_NAME,
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Header,
    LineReader,
    TaskRecord,
)
from tvm_energy.replay import max_power_w
from tvm_energy.work_dir import (
    TUNING_RECORD_FILE,
    WORKLOAD_FILE,
    check_stock,
    is_tuning_record,
    is_workload,
    stock_key,
    stock_values,
)

_STOCK_OBJECTIVES = ("latency", "energy", "edp", "ed2p", "energy:slack=0.05")


@dataclass
class Pruned:
    """What came of it.

    Attributes:
        lines_before, lines: lines of records before and after.
        kernels: kept.
        tuning_records, ansor_records: lines kept of the stock database, and of the log of legacy Ansor; 0
            without one.
        without_record: kept kernels that neither of the two has.
    """

    lines_before: int = 0
    lines: int = 0
    kernels: int = 0
    tuning_records: int = 0
    ansor_records: int = 0
    without_record: int = 0


def prune(source: Path, output: Path, *, objective: str | None = None, keep: int = 5) -> Pruned:
    """Write a pruned copy of a work directory or record file into a new work directory.

    Args:
        source: only read.
        output: a directory.
        objective: kept for, beside the stock ones and those of the runs.
        keep: how many of the best kernels of each task are kept for each objective.

    Raises:
        ConfigurationError: a missing source, an unknown objective, or the output exists.
        RecordFormatError: naming file and line of a broken line; a torn last line is left out.
    """
    if keep < 1:
        raise ConfigurationError(f"at least 1 kernel of each task is kept, got {keep}")
    for name in (FILE_NAME, WORKLOAD_FILE, TUNING_RECORD_FILE, LOG_FILE):
        refuse_existing(output / name)
    if source.is_dir():
        check_stock(source)
        check_log(source)
    path, log = record_file(source), Log.of(source)
    objectives = _objectives(log, objective)
    whole = kernels_by_workload(filtered(log.records(), log.header, Counter()))
    kept = {workload: _kept(kernels, objectives, keep) for workload, kernels in whole.items()}
    result = Pruned(kernels=sum(map(len, kept.values())))
    with new_file(output / FILE_NAME) as file:
        for line in _lines(path, whole, kept, result):
            file.write(line)
    if source.is_dir():
        found = _prune_stock(source, output, kept, result)
        found |= _prune_ansor(source, output, kept, result)
        result.without_record = result.kernels - len(found)
    return result


def _objectives(log: Log, wanted: str | None) -> list[Objective]:
    specs = dict.fromkeys([*_STOCK_OBJECTIVES, *(header.objective for header in log.headers)])
    if wanted is not None:
        specs[wanted] = None
    limit_w = max_power_w(log.header)
    return [parse_objective(spec, max_power_w=limit_w) for spec in specs]


def _kept(kernels: Mapping[str, Kernel], objectives: list[Objective], keep: int) -> set[str]:
    """Keys of the kernels of one task that stay."""
    fastest = min(kernels.values(), key=lambda kernel: kernel.latency_s)
    kept = {fastest.key} | {kernel.key for kernel in kernels.values() if kernel.final}
    best_j = float("inf")
    measured = [kernel for kernel in kernels.values() if kernel.measured]
    for kernel in sorted(measured, key=lambda kernel: (kernel.latency_s, kernel.energy_j)):
        if kernel.energy_j is not None and kernel.energy_j < best_j:
            best_j = kernel.energy_j
            kept.add(kernel.key)
    for objective in objectives:
        choice = choose(kernels.values(), objective)
        if choice is None:
            continue
        kept |= {choice.best.key, choice.fastest.key, *(kernel.key for kernel in choice.ties)}
        pool = measured if objective.needs_energy else list(kernels.values())
        values = costs(pool, objective, choice.fastest.latency_s)
        order = sorted(range(len(pool)), key=values.__getitem__)
        kept |= {pool[index].key for index in order[:keep]}
    return kept


def _lines(
    path: Path,
    whole: Mapping[str, Mapping[str, Kernel]],
    kept: Mapping[str, Collection[str]],
    result: Pruned,
) -> Iterator[str]:
    reader = LineReader(path)
    for number, line in read_lines(path):
        try:
            record = reader.read(number, line)
        except RecordFormatError:
            if line.endswith(b"\n"):
                raise
            return
        result.lines_before += 1
        text = line.decode().rstrip("\n")
        if isinstance(record, CandidateRecord):
            if record.key not in kept.get(record.workload, ()) or record.latency_s is None:
                continue
        elif isinstance(record, FinalRecord):
            if record.key not in kept.get(record.workload, ()):
                continue
            # Whether a final is the last word is told by the number of kernels, which has changed.
            current = record.candidates == len(whole[record.workload])
            values = parse_line(line)
            values["candidates"] = len(kept[record.workload]) if current else 0
            text = json.dumps(values)
        elif isinstance(record, ClockRecord):
            if record.key not in kept.get(record.workload, ()):
                continue
        elif not isinstance(record, (Header, TaskRecord)):
            continue
        result.lines += 1
        yield text + "\n"


def _prune_stock(
    source: Path, output: Path, kept: Mapping[str, Collection[str]], result: Pruned
) -> set[tuple[str, str]]:
    """The tuning records of the kept kernels, with the workloads that they name; which were found."""
    found: set[tuple[str, str]] = set()
    if not (source / WORKLOAD_FILE).exists():
        return found
    hashes: list[str] = []
    indices: dict[str, int] = {}
    with new_file(output / WORKLOAD_FILE) as file:
        for line, value in stock_values(source / WORKLOAD_FILE):
            if is_workload(value):
                hashes.append(value[0])
                if value[0] in kept and value[0] not in indices:
                    indices[value[0]] = len(indices)
                    file.write(line)
    with new_file(output / TUNING_RECORD_FILE) as file:
        for _, value in stock_values(source / TUNING_RECORD_FILE):
            if not is_tuning_record(value):
                continue
            workload = hashes[value[0]]
            key = stock_key(value)
            if key in kept.get(workload, ()):
                found.add((workload, key))
                value[0] = indices[workload]
                file.write(json.dumps(value, separators=(",", ":")) + "\n")
                result.tuning_records += 1
    return found


def _prune_ansor(
    source: Path, output: Path, kept: Mapping[str, Collection[str]], result: Pruned
) -> set[tuple[str, str]]:
    """The lines of the kept kernels in the log of legacy Ansor; which were found."""
    found: set[tuple[str, str]] = set()
    if not (source / LOG_FILE).exists():
        return found
    with new_file(output / LOG_FILE) as file:
        for workload, key, line in read_log(source / LOG_FILE):
            if key in kept.get(workload, ()):
                found.add((workload, key))
                file.write(line)
                result.ansor_records += 1
    return found
