"""Trials an hour: stock MetaSchedule against tvm_energy on this CPU.

The same workload, target, number of trials and seed, each in a process of its own, one after the
other, wall time of the whole process. The last line of stdout is one JSON object: ``stock_s``,
``ours_s``, ``ratio``, ``peak_mb`` (largest sum of resident memory over our process and its workers).
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

#: Seconds that stock's builder and runner may take for one candidate.
STOCK_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 trials instead of 64")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--trials", type=int, default=None)
    parser.add_argument("--worker", choices=["stock", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    trials = options.trials or (16 if options.quick else 64)
    if options.worker:
        tune(options.worker, trials)
        return
    ours_s, peak_mb = timed("ours", trials, options.json)
    stock_s, stock_peak_mb = timed("stock", trials, options.json)
    result = {
        "trials": trials,
        "stock_s": round(stock_s, 1),
        "ours_s": round(ours_s, 1),
        "ratio": round(stock_s / ours_s, 2),
        "peak_mb": round(peak_mb),
        "stock_peak_mb": round(stock_peak_mb),
    }
    if not options.json:
        print(f"stock {stock_s:.0f} s, ours {ours_s:.0f} s: {result['ratio']} times faster")
    print(json.dumps(result))


def timed(kind: str, trials: int, quiet: bool) -> tuple[float, float]:
    """Wall seconds and peak MB of one tuning process with all its workers."""
    command = [sys.executable, __file__, "--worker", kind, "--trials", str(trials)]
    if not quiet:
        print(f"tuning with {kind} ...", file=sys.stderr)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr if not quiet else subprocess.DEVNULL)
    peak = PeakMemory(process.pid)
    status = process.wait()
    seconds = time.perf_counter() - started
    peak.stop()
    if status:
        sys.exit(f"tuning with {kind} failed with exit code {status}")
    return seconds, peak.mb


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


def tune(kind: str, trials: int) -> None:
    """Tune one matmul; runs in a process of its own."""
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

            database = tvm_energy.tune_tir(
                *arguments, num_trials_per_iter=16, seed=1, objective="latency", device="cpu"
            )
        records = database.get_all_tuning_records()
        times = [float(record.run_secs[0]) for record in records]
        valid = [value for value in times if value < 1e9]
        if not valid:
            sys.exit(f"{kind}: none of {len(times)} candidates ran")
        print(f"{kind}: {len(valid)} of {len(times)} ran, best {min(valid) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
