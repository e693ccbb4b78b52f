"""Trials an hour: stock MetaSchedule, or stock Ansor, against tvm_energy on this CPU.

The same workload, target, number of trials and seed, each in a process of its own, one after the
other, wall time of the whole process. The last line of stdout is one JSON object: ``stock_s``,
``ours_s``, ``ratio``, ``peak_mb`` (largest sum of resident memory over our process and its workers),
``stock_best_us``, ``ours_best_us`` (the fastest kernel that each found). Both search as they do by default;
Stock has MetaSchedule's search and its population of 512; ours has our search, or with ``--population`` MetaSchedule's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time

import psutil
from arguments import positive

#: Seconds that stock's builder and runner may take for one candidate.
STOCK_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 trials instead of 64")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--trials", type=positive, default=None)
    parser.add_argument(
        "--engine",
        choices=list(ENGINES),
        default="meta_schedule",
        help="ansor: run this with the Python of scripts/ansor-environment",
    )
    parser.add_argument(
        "--population", type=positive, help="search as MetaSchedule does, with this population"
    )
    parser.add_argument("--worker", choices=["stock", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    trials = options.trials or (16 if options.quick else 64)
    if options.worker:
        best_s = ENGINES[options.engine](options.worker, trials, options.population)
        print(best_s * 1e6)
        return
    ours_s, peak_mb, ours_best_us = timed("ours", trials, options)
    stock_s, stock_peak_mb, stock_best_us = timed("stock", trials, options)
    result = {
        "engine": options.engine,
        "trials": trials,
        "stock_s": round(stock_s, 1),
        "ours_s": round(ours_s, 1),
        "ratio": round(stock_s / ours_s, 2),
        "peak_mb": round(peak_mb),
        "stock_peak_mb": round(stock_peak_mb),
        "ours_best_us": round(ours_best_us, 1),
        "stock_best_us": round(stock_best_us, 1),
    }
    if not options.json:
        print(f"stock {stock_s:.0f} s, ours {ours_s:.0f} s: {result['ratio']} times faster")
    print(json.dumps(result))


def timed(kind: str, trials: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Wall seconds and peak MB of one tuning process with all its workers; its best kernel, in microseconds."""
    quiet = options.json
    command = [sys.executable, __file__, "--worker", kind, "--trials", str(trials)]
    command += ["--engine", options.engine]
    if options.population is not None:
        command += ["--population", str(options.population)]
    if not quiet:
        print(f"tuning with {kind} ...", file=sys.stderr)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = PeakMemory(process.pid)
    printed, _ = process.communicate()
    status = process.returncode
    seconds = time.perf_counter() - started
    peak.stop()
    if status:
        sys.exit(f"tuning with {kind} failed with exit code {status}")
    return seconds, peak.mb, float(printed.split()[-1])


class PeakMemory:
    """Samples the resident memory of a process tree twice a second."""

    def __init__(self, pid: int) -> None:
        self.mb = 0.0
        self._process = psutil.Process(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            total = 0
            try:
                for process in [self._process, *self._process.children(recursive=True)]:
                    total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self.mb = max(self.mb, total / 2**20)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def tune(kind: str, trials: int, population: int | None = None) -> float:
    """Tune one matmul; runs in a process of its own. Seconds of the best kernel."""
    import tvm
    from tvm import te

    size = 256
    a = te.placeholder((size, size), name="A")
    b = te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    function = te.create_prim_func([a, b, c])
    target = tvm.target.Target({"kind": "llvm", "num-cores": psutil.cpu_count() or 1})
    with tempfile.TemporaryDirectory() as folder:
        arguments = (function, target, folder, trials)
        if kind == "stock":
            from tvm.s_tir import meta_schedule as ms

            # A stock worker imports TVM and parses all intrinsics before its first build, which takes
            # longer than the default limit of 30 s on a slow machine: then nothing would be built.
            database = ms.tune_tir(
                *arguments,
                num_trials_per_iter=16,
                seed=1,
                builder=ms.builder.LocalBuilder(timeout_sec=STOCK_TIMEOUT_S),
                runner=ms.runner.LocalRunner(timeout_sec=STOCK_TIMEOUT_S),
            )
        else:
            import tvm_energy
            from tvm_energy.meta_schedule.tuning import evolutionary_search

            search = {} if population is None else {"strategy": evolutionary_search(population)}
            database = tvm_energy.tune_tir(
                *arguments,
                num_trials_per_iter=16,
                seed=1,
                objective="latency",
                device="cpu",
                **search,
            )
        records = database.get_all_tuning_records()
        times = [float(record.run_secs[0]) for record in records]
        valid = [value for value in times if value < 1e9]
        if not valid:
            sys.exit(f"{kind}: none of {len(times)} candidates ran")
        print(f"{kind}: {len(valid)} of {len(times)} ran", file=sys.stderr)
        return min(valid)


def tune_ansor(kind: str, trials: int, population: int | None = None) -> float:
    """Tune the same matmul with Ansor, both with a population of 128; else as `tune`."""
    from pathlib import Path

    from tvm import auto_scheduler

    from tvm_energy import ansor
    from tvm_energy.ansor_log import LOG_FILE

    task = ansor.workload_task("matmul:m=256,n=256,k=256", device="cpu")
    params = {"evolutionary_search_population": 128, "evolutionary_search_num_iters": 2}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "stock":
            log = Path(folder) / "log.json"
            options = auto_scheduler.TuningOptions(
                num_measure_trials=trials,
                num_measures_per_round=16,
                verbose=0,
                # The default limit of 15 s is not enough for a worker to start on a slow machine.
                builder=auto_scheduler.LocalBuilder(timeout=300),
                runner=auto_scheduler.LocalRunner(timeout=300),
                measure_callbacks=[auto_scheduler.RecordToFile(str(log))],
            )
            policy = auto_scheduler.SketchPolicy(
                task, auto_scheduler.XGBModel(), params=params, seed=1, verbose=0
            )
            task.tune(options, search_policy=policy)
        else:
            log = Path(folder) / LOG_FILE
            ansor.tune(
                task,
                auto_scheduler.TuningOptions(num_measure_trials=trials, num_measures_per_round=16),
                work_dir=folder,
                objective="latency",
                search_policy_params=params,
                seed=1,
            )
        results = [result for _, result in auto_scheduler.load_records(str(log))]
        valid = [float(r.costs[0].value) for r in results if int(r.error_no) == 0]
        if not valid:
            sys.exit(f"{kind}: none of {len(results)} candidates ran")
        print(f"{kind}: {len(valid)} of {len(results)} ran", file=sys.stderr)
        return min(valid)


ENGINES = {"meta_schedule": tune, "ansor": tune_ansor}

if __name__ == "__main__":
    main()
