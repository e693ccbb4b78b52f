#!/usr/bin/env python3
"""How long a large log takes to be verified and ranked, and how much memory.

Generates a log of made-up kernels (``--records`` lines, of which a part has a measured energy), then runs
`verify` and `summarize` on it, at the same time in two processes, each reading the file line by line.

    scripts/bench_log.py                    # one million lines
    scripts/bench_log.py --quick --json     # a tenth, the same keys
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arguments import positive

from tvm_energy.logs.verify import Counts, verify
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.records import FILE_NAME, CandidateRecord, Header, RoundRecord, TaskRecord, to_json
from tvm_energy.replay import summarize

#: Candidates of one round, tasks of the log.
PER_ROUND, TASKS = 64, 25


def header() -> Header:
    return Header(
        device={"name": "Made-up device", "uuid": "sim:made-up", "simulated": True},
        meter={"meter": "simulated", "method": "counter", "scope": "gpu", "max_power_w": 400.0},
        objective="energy:slack=0.05",
        policy="all",
        plan={"window_s": 1.0},
        versions={},
        seed=0,
        created=time.time(),
    )


def candidate(rng: random.Random, workload: str, number: int, measured: bool) -> CandidateRecord:
    latency_s = 1e-4 * (1 + rng.expovariate(2.0))
    energy_j = latency_s * rng.uniform(150, 250)
    energy = EnergyMeasurement(
        energy_j=energy_j,
        stderr_j=0.002 * energy_j,
        latency_s=latency_s * rng.uniform(0.99, 1.01),
        launches=rng.randint(1000, 100_000),
        windows=2,
        window_s=rng.uniform(2.0, 2.1),
        sensor_updates=20,
        method="counter",
        meter="simulated",
        scope="gpu",
        clock_mhz=1410.0,
        temperature_c=rng.uniform(40, 60),
        device_s=rng.uniform(2.7, 2.9),
        simulated=True,
    )
    return CandidateRecord(
        workload=workload,
        key=f"{rng.getrandbits(64):016x}",
        module=f"{rng.getrandbits(64):016x}",
        round=number,
        latency_s=latency_s,
        measured=energy if measured else None,
        predicted_energy_j=energy_j * rng.uniform(0.9, 1.1),
        predicted_stderr_j=0.05 * energy_j,
    )


def generate(path: Path, records: int, measured_part: float) -> None:
    """Write a log of so many lines; every figure in it is made up."""
    rng = random.Random(1)
    workloads = [str(rng.getrandbits(64)) for _ in range(TASKS)]
    with path.open("w", encoding="utf-8") as file:
        lines = [header(), *(TaskRecord(task=f"task {w}", workload=w) for w in workloads)]
        written, number = 0, 0
        while written < records:
            for record in lines[: records - written]:
                file.write(json.dumps(to_json(record)) + "\n")
            written += len(lines)
            workload = workloads[number % TASKS]
            batch = [
                candidate(rng, workload, number // TASKS, rng.random() < measured_part)
                for _ in range(PER_ROUND)
            ]
            measured = sum(record.measured is not None for record in batch)
            closing = RoundRecord(
                workload=workload,
                round=number // TASKS,
                candidates=PER_ROUND,
                gated=measured,
                measured=measured,
                chosen=tuple(record.key for record in batch if record.measured),
                policy_state={"fraction": 1.0, "rounds": number // TASKS + 1},
                seconds={"measure": 1.0, "measure_device": 2.8 * measured, "learn": 0.5},
            )
            lines = [*batch, closing]
            number += 1


def check(path: Path) -> dict[str, float]:
    """Verify; like `rank` in a process of its own, so that the memory is its own, too."""
    counts = Counts()
    for problem in verify(path, counts):
        raise SystemExit(f"the generated log is broken: {problem}")
    return {"records": sum(counts.lines.values()), **used()}


def rank(path: Path) -> dict[str, float]:
    """Rank."""
    if any(task.best is None for task in summarize(path).tasks):
        raise SystemExit("a task of the generated log has no winner")
    return used()


def used() -> dict[str, float]:
    """Seconds of this process, and its greatest memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu": usage.ru_utime + usage.ru_stime, "mb": usage.ru_maxrss / 1024}


def measure(path: Path) -> dict[str, Any]:
    """Verify and rank at the same time, in two processes."""
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        started = time.perf_counter()
        verifying, ranking = (pool.apply_async(work, (path,)) for work in (check, rank))
        verified, ranked = verifying.get(), ranking.get()
        seconds = time.perf_counter() - started
    return {
        "records": verified["records"],
        "seconds": round(seconds, 2),
        "peak_mb": round(verified["mb"] + ranked["mb"], 1),
        "verify_cpu_seconds": round(verified["cpu"], 2),
        "rank_cpu_seconds": round(ranked["cpu"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=positive, default=1_000_000)
    parser.add_argument("--measured", type=float, default=0.4, help="part with a measured energy")
    parser.add_argument("--quick", action="store_true", help="100,000 records")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    records = 100_000 if options.quick else options.records
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        print(f"generating {records} records ...", file=sys.stderr)
        generate(path, records, options.measured)
        size_mb = path.stat().st_size / 1e6
        print(f"{size_mb:.0f} MB; verifying and ranking ...", file=sys.stderr)
        result = measure(path)
    result |= {"file_mb": round(size_mb, 1), "measured_part": options.measured}
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['records']} records ({result['file_mb']} MB) verified and ranked in "
            f"{result['seconds']} s (CPU time: {result['verify_cpu_seconds']} s and "
            f"{result['rank_cpu_seconds']} s); peak memory of both {result['peak_mb']} MB"
        )


if __name__ == "__main__":
    main()
