"""Collect a table of many kernels of a few workloads, each with latency and measured energy.

Each workload is tuned in a work directory of its own with the policy ``all`` and a latency gate so wide (11 times the
fastest) that the energy of every kernel of interest is measured, until enough are. An interrupted run goes on with the same
command, and nothing is measured twice. Nothing is ever set on the card: no clocks, no limits.

Written to ``--output``, also when the run was interrupted, then with what there is so far:

``table.csv.xz``  a row a kernel: latency, energy, how it was measured, and the schedule trace as JSON
``about.json``    device, driver, dates, versions, plan, and whether the device is a simulated one
``pools.npz``     per-store features, round, latency and energy, for ``bench_policy.py --table``

The last line of stdout is one JSON object. On a simulated device every number is simulated, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import lzma
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from bench_energy import QUICK, WORKLOADS
from candidate_pools import Kernels, save

from tvm_energy.cli.guard import stdout_for_results
from tvm_energy.cli.terminal import PlainProgress
from tvm_energy.errors import ConfigurationError, TvmEnergyError, WorkDirError
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.progress import Progress, SilentProgress
from tvm_energy.records import FILE_NAME, CandidateRecord, Header, RoundRecord, read_records
from tvm_energy.tuning_run import Interrupted
from tvm_energy.work_dir import (
    TUNING_RECORD_FILE,
    WORKLOAD_FILE,
    load,
    locked_work_dir,
    stock_key,
    stock_values,
)

TABLE = "table.csv.xz"
ABOUT = "about.json"
POOLS = "pools.npz"
OBJECTIVE = "energy:slack=10"
POLICY = "all"
NEAR_FASTEST = 1.05
#: Candidates tried for each kernel that is wanted, at most.
MOST_TRIALS = 5

#: Columns that come from `EnergyMeasurement` as they are.
_MEASUREMENT_COLUMNS = [
    field.name
    for field in dataclasses.fields(EnergyMeasurement)
    if field.name not in ("energy_j", "stderr_j", "latency_s")
]
COLUMNS = [
    *("workload", "spec", "key", "round", "latency_s", "energy_j", "energy_stderr_j", "power_w"),
    *("window_latency_s", *_MEASUREMENT_COLUMNS, "trace"),
]


@dataclass(frozen=True)
class Effort:
    """How much is searched: measured kernels a workload, candidates a round, population of the search."""

    kernels: int
    per_round: int
    population: int | None = None
    seed: int | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:N, sim:a100, ...; default auto"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=list(QUICK),
        metavar="NAME",
        help=f"of {', '.join(WORKLOADS)}; or like matmul:m=64,n=64,k=64; default {' '.join(QUICK)}",
    )
    parser.add_argument("--work-dir", type=Path, default=Path("gpu-table"))
    parser.add_argument("--output", type=Path, help="directory; default: table in the work dir")
    parser.add_argument("--kernels", type=int, help="measured kernels a workload; default 120")
    parser.add_argument("--trials-per-round", type=int, help="default 16")
    parser.add_argument("--population", type=int, help="of the search; default 8 a candidate")
    parser.add_argument("--seed", type=int, help="of the search; drawn by default")
    parser.add_argument(
        "--minutes", type=float, help="stop after the round in which this is over; all together"
    )
    parser.add_argument("--quick", action="store_true", help="16 kernels a workload")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args(arguments)
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes must be positive, got {options.minutes:g}")
    usual = Effort(16, 8, 32) if options.quick else Effort(120, 16)
    effort = Effort(
        kernels=usual.kernels if options.kernels is None else options.kernels,
        per_round=usual.per_round if options.trials_per_round is None else options.trials_per_round,
        population=usual.population if options.population is None else options.population,
        seed=options.seed,
    )
    output = options.output or options.work_dir / "table"
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with stdout_for_results():
            result = make(
                {name: WORKLOADS.get(name, name) for name in options.workloads},
                effort,
                device=options.device,
                work_dir=options.work_dir,
                output=output,
                minutes=options.minutes,
                command=shlex.join([f"scripts/{Path(__file__).name}", *given]),
                quiet=options.json,
            )
    except TvmEnergyError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigurationError) else 1
    except OSError as exc:
        print(f"error: {exc.strerror or exc}: {exc.filename}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues from there", file=sys.stderr)
        return 1
    print(json.dumps(result, allow_nan=False))
    return 1 if result["stopped"] == "interrupted" else 0


def make(
    workloads: Mapping[str, str],
    effort: Effort,
    *,
    device: str,
    work_dir: Path,
    output: Path,
    minutes: float | None,
    command: str,
    quiet: bool,
) -> dict[str, Any]:
    """Collect kernels, write the table; returns what is printed."""
    check_writable(output)
    functions = primfuncs(workloads)
    from tvm_energy.meta_schedule.device import open_device

    progress: Progress = SilentProgress() if quiet else PlainProgress()
    with contextlib.closing(open_device(device)) as opened:
        simulated = bool(opened.identity["simulated"])
        name = opened.spec if simulated else str(opened.identity["name"])
        target = opened.target
        if simulated and not quiet:
            progress.message(f"{name} is a simulated device: every number is simulated")
        stopped = collect(opened, functions, effort, work_dir, minutes, progress)
    if stopped and not quiet:
        progress.message(f"{stopped}; the same command continues from there")
    found = {each: read_kernels(work_dir / folder(each), target) for each in workloads}
    if not any(kernels.measured for kernels in found.values()):
        raise WorkDirError(f"no kernel in {work_dir} has a measured energy yet; let it run longer")
    about = describe(found, workloads, name, simulated, command)
    write(output, workloads, found, about)
    facts = {each: summary(found[each], spec) for each, spec in workloads.items()}
    spreads = [row["energy_spread"] for row in facts.values() if row["energy_spread"] is not None]
    return {
        "device": name,
        "simulated": simulated,
        "driver": about["driver"],
        "kernels": sum(row["kernels"] for row in facts.values()),
        "measured": sum(row["measured"] for row in facts.values()),
        "energy_spread": max(spreads, default=None),
        "workloads": facts,
        "stopped": stopped,
        "path": str(output),
    }


def check_writable(output: Path) -> None:
    """Found out now and not after hours of measuring."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise WorkDirError(
            f"cannot write to {output}: {exc.strerror}; choose another --output"
        ) from exc


def folder(workload: str) -> str:
    """The work directory of a workload, below that of the run."""
    return re.sub(r"[^\w.=]+", "-", workload)


def primfuncs(workloads: Mapping[str, str]) -> dict[str, Any]:
    """The functions to tune; a wrong spec is a `ConfigurationError`."""
    # compat, which this module imports first, refuses a TVM that would crash.
    from tvm_energy.meta_schedule.workloads import parse_workload

    return {name: parse_workload(spec).primfunc() for name, spec in workloads.items()}


# -- collecting --------------------------------------------------------------------------------


def collect(
    device: Any,
    functions: Mapping[str, Any],
    effort: Effort,
    work_dir: Path,
    minutes: float | None,
    progress: Progress,
) -> str | None:
    """Tune each workload until it has its number of measured kernels; why it stopped before, or None.

    Each workload has an equal part of the time that is left, so that none goes without.
    """
    from tvm_energy.meta_schedule.tuning import TuningTask, run

    for name in functions:
        # A directory of another device is found out before the first of them is worked on.
        count(work_dir / folder(name), device)
    limited = TimeLimit(progress)
    end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for done, (name, function) in enumerate(functions.items()):
        now_s = time.monotonic()
        if now_s >= end_s:
            return "time is over"
        limited.end_s = now_s + (end_s - now_s) / (len(functions) - done)
        path = work_dir / folder(name)
        try:
            for trials in trials_needed(path, device, effort):
                limited.pressed = False
                run(
                    [TuningTask(name=name, mod=function)],
                    device=device,
                    work_dir=path,
                    trials=trials,
                    trials_per_round=effort.per_round,
                    objective=OBJECTIVE,
                    policy=POLICY,
                    seed=effort.seed,
                    finalists=0,
                    population=effort.population,
                    progress=limited,
                )
        except Interrupted:
            if not limited.pressed:
                return "interrupted"
    enough = all(count(work_dir / folder(name), device)[1] >= effort.kernels for name in functions)
    late = limited.ever_pressed and not enough
    return "time is over" if late else None


class TimeLimit:
    """Passes progress on, and presses Ctrl-C at the end of the round in which time is over.

    Only a search can be stopped that way; elsewhere, as while TVM is imported, it would break things.

    Attributes:
        end_s: when, by the monotonic clock.
        pressed: whether it was this and not the user, since that was last reset.
        ever_pressed: the same of all times.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.end_s = math.inf
        self.pressed = self.ever_pressed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        self._progress.round_finished(task, record, trials_done)
        if time.monotonic() >= self.end_s and not self.pressed:
            self.pressed = self.ever_pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def trials_needed(path: Path, device: Any, effort: Effort) -> Iterator[int]:
    """Candidates to try in all, again and again until enough are measured or no more can be had.

    Some fail, and of the first, which are random, many are beyond the gate.
    """
    before = -1
    while True:
        tried, measured = count(path, device)
        missing = effort.kernels - measured
        if missing <= 0 or tried == before or tried >= MOST_TRIALS * effort.kernels:
            return
        before = tried
        yield tried + max(missing, effort.per_round)


def count(path: Path, device: Any) -> tuple[int, int]:
    """Candidates tried and kernels measured so far; refuses records of another device."""
    with locked_work_dir(path):
        records = load(path, str(device.identity["uuid"]))
    tried = [each for each in records if isinstance(each, CandidateRecord)]
    return len(tried), len({each.key for each in tried if each.measured is not None})


# -- reading back ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What one work directory holds.

    Attributes:
        headers: of its runs.
        tried: number of candidates.
        measured: kernels with an energy, in the order in which they were tried.
        traces: schedule traces by key, JSON.
        rows: per-store features by key, shape (n_stores, 164).
    """

    headers: list[Header]
    tried: int
    measured: list[tuple[CandidateRecord, EnergyMeasurement]]
    traces: dict[str, str]
    rows: dict[str, np.ndarray]


def read_kernels(path: Path, target: Any) -> Found:
    """The kernels of one workload that can be built again from the directory."""
    if not (path / FILE_NAME).exists():
        return Found(headers=[], tried=0, measured=[], traces={}, rows={})
    records = list(read_records(path / FILE_NAME))
    tried = [each for each in records if isinstance(each, CandidateRecord)]
    traces = {
        stock_key(value): json.dumps(value[1][0], separators=(",", ":"))
        for _, value in stock_values(path / TUNING_RECORD_FILE)
    }
    by_key = {each.key: each for each in tried if each.measured is not None and each.key in traces}
    return Found(
        headers=[each for each in records if isinstance(each, Header)],
        tried=len(tried),
        measured=[(each, each.measured) for each in by_key.values() if each.measured is not None],
        traces=traces,
        rows=features(path, set(by_key), target) if by_key else {},
    )


def features(path: Path, keys: set[str], target: Any) -> dict[str, np.ndarray]:
    """Per-store features of the kernels in a stock database."""
    from tvm_energy.meta_schedule.compat import tensor_intrinsics

    # isort: split
    from tvm.s_tir import meta_schedule as ms

    from tvm_energy.meta_schedule.traces import trace_key

    with tensor_intrinsics(target):
        database = ms.database.JSONDatabase(
            path_workload=str(path / WORKLOAD_FILE),
            path_tuning_record=str(path / TUNING_RECORD_FILE),
        )
        records = {trace_key(record.trace): record for record in database.get_all_tuning_records()}
        wanted = {key: record for key, record in records.items() if key in keys}
        workload = next(iter(wanted.values())).workload
        extracted = ms.feature_extractor.PerStoreFeature(extract_workload=False).extract_from(
            ms.TuneContext(mod=workload.mod, target=target),
            [record.as_measure_candidate() for record in wanted.values()],
        )
    return {key: row.numpy() for key, row in zip(wanted, extracted, strict=True)}


# -- what is written ---------------------------------------------------------------------------


def summary(found: Found, spec: str) -> dict[str, Any]:
    """Counts, and how far energy spreads among kernels about as fast as the fastest."""
    fastest_s = min((each.latency_s or 0.0 for each, _ in found.measured), default=0.0)
    near_j = [
        measured.energy_j
        for each, measured in found.measured
        if (each.latency_s or 0.0) <= NEAR_FASTEST * fastest_s
    ]
    return {
        "spec": spec,
        "kernels": found.tried,
        "measured": len(found.measured),
        "near_fastest": len(near_j),
        "energy_spread": round(max(near_j) / min(near_j) - 1, 5) if len(near_j) > 1 else None,
    }


def describe(
    found: Mapping[str, Found],
    workloads: Mapping[str, str],
    name: str,
    simulated: bool,
    command: str,
) -> dict[str, Any]:
    """What others must know of the table; nothing that tells one card of a kind from another."""
    headers = [header for each in found.values() for header in each.headers]
    last = max(headers, key=lambda header: header.created)
    drivers = sorted({str(h.device["driver"]) for h in headers if h.device.get("driver")})
    meter = {
        key: value
        for key, value in (last.meter or {}).items()
        if isinstance(value, (str, int, float, bool)) and "uuid" not in key
    }
    return {
        "device": name,
        "simulated": simulated,
        "driver": ", ".join(drivers) or None,
        "first_run": date(min(header.created for header in headers)),
        "last_run": date(last.created),
        "versions": last.versions,
        "command": re.sub(r"(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]*", "UUID", command),
        "objective": last.objective,
        "policy": last.policy,
        "plan": last.plan,
        "meter": meter,
        "target": last.device.get("target"),
        "workloads": dict(workloads),
        "measured": {each: len(kernels.measured) for each, kernels in found.items()},
    }


def date(created: float) -> str:
    return datetime.fromtimestamp(created, timezone.utc).isoformat(timespec="seconds")


def write(
    output: Path,
    workloads: Mapping[str, str],
    found: Mapping[str, Found],
    about: Mapping[str, Any],
) -> None:
    """All three files; each is complete or as it was before."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    for name, kernels in found.items():
        for record, measured in kernels.measured:
            writer.writerow(row(name, workloads[name], record, measured, kernels.traces))
    pools = {name: pool_of(kernels, about["device"]) for name, kernels in found.items()}
    part = output / f".part-{os.getpid()}"
    try:
        part.write_bytes(lzma.compress(text.getvalue().encode()))
        part.replace(output / TABLE)
        part.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        part.replace(output / ABOUT)
        # savez adds the ending where it is missing.
        ended = part.with_name(part.name + ".npz")
        save(ended, {name: each for name, each in pools.items() if each.rows})
        ended.replace(output / POOLS)
    finally:
        for rest in (part, part.with_name(part.name + ".npz")):
            rest.unlink(missing_ok=True)


def row(
    name: str,
    spec: str,
    record: CandidateRecord,
    measured: EnergyMeasurement,
    traces: Mapping[str, str],
) -> dict[str, Any]:
    values = measured.to_json()
    return {
        **{column: values[column] for column in _MEASUREMENT_COLUMNS},
        "workload": name,
        "spec": spec,
        "key": record.key,
        "round": record.round,
        "latency_s": record.latency_s,
        "energy_j": measured.energy_j,
        "energy_stderr_j": measured.stderr_j,
        "power_w": measured.power_w,
        "window_latency_s": measured.latency_s,
        "throttle_reasons": " ".join(measured.throttle_reasons),
        "trace": traces[record.key],
    }


def pool_of(kernels: Found, device: str) -> Kernels:
    """The measured kernels as a pool to replay; rounds count from 0 without gaps."""
    rounds = np.array([record.round for record, _ in kernels.measured], dtype=int)
    return Kernels(
        rows=[kernels.rows[record.key] for record, _ in kernels.measured],
        round=np.unique(rounds, return_inverse=True)[1],
        latency_s={device: np.array([record.latency_s for record, _ in kernels.measured])},
        energy_j={device: np.array([measured.energy_j for _, measured in kernels.measured])},
    )


if __name__ == "__main__":
    sys.exit(main())
