"""Check the energy sensors of a GPU: everything worth knowing in one go, in about three minutes.

Nothing is ever set on the card. Steps, each written to the file of results as soon as it is done, and skipped
when the file already holds it for the same card, driver and load:

``update_period``        each sensor polled under load: time between changes, calls a second
``counter_and_power``    counter, integrated instant power and averaged power of one load, and at idle
``repeatability``        one kernel measured 20 times: scatter against the stated standard error
``two_kernels``          the smallest energy difference that is told apart in 5 s: kernels that do 0 to 8 % more
                         work, each against the same base, interleaved

The load is a loop of multiply-adds compiled with TVM (``tvm``), a matrix product of PyTorch (``torch``), or,
for a stand-in library without a device, time that only passes (``sleep``). Without a GPU the script says what
it would do. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, MeasurementError, MeterUnavailable, TvmEnergyError
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meters.base import Load, PowerMeter, Reading
from tvm_energy.meters.lock import device_lock
from tvm_energy.meters.nvml import NvmlMeter, open_nvml_meter
from tvm_energy.meters.window import BusyDevice, integrate_j
from tvm_energy.protocol import calibrate, measure, measure_interleaved
from tvm_energy.version import __version__

SENSORS = ("counter", "instant", "usage")
CHUNK_S = 0.05
POLL_S = 0.002


@dataclass(frozen=True)
class Effort:
    """How much of everything.

    ``more_work``: than the base kernel, in the order in which the kernels are compared with it.
    """

    watch_s: float = 2.5
    load_s: float = 5.0
    idle_s: float = 3.0
    repeats: int = 20
    pair_s: float = 5.0
    more_work: tuple[float, ...] = (0.0, 0.08, 0.04, 0.02, 0.01, 0.005, 0.0)
    plan: MeasurementPlan = field(default_factory=MeasurementPlan)


QUICK = Effort(
    watch_s=0.4,
    load_s=0.5,
    idle_s=0.3,
    repeats=3,
    pair_s=0.9,
    more_work=(0.0, 0.2),
    plan=MeasurementPlan(warmup_s=0.06, window_s=0.1, budget_s=1.0),
)


# ---- loads --------------------------------------------------------------------------------------


class SleepLoad:
    """Launches that take 2 ms: the 'device' is busy because we say so."""

    def __init__(self, work: float) -> None:
        self._latency_s = 2e-3 * (1 + work)
        self._until_s = 0.0

    def enqueue(self, launches: int) -> None:
        self._until_s = max(time.perf_counter(), self._until_s) + launches * self._latency_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._until_s - time.perf_counter()))


class TorchLoad:
    """A matrix product in half precision; the card's events tell how long it ran."""

    def __init__(self, work: float) -> None:
        import torch

        size = 4096
        self._torch = torch
        generator = torch.Generator(device="cuda").manual_seed(0)
        kind: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "generator": generator}
        self._a = torch.randn(round(size * (1 + work)), size, **kind)
        self._b = torch.randn(size, size, **kind)
        self._out = torch.empty(self._a.shape[0], size, device="cuda", dtype=torch.float16)
        self._events: list[tuple[Any, Any]] = []
        self._device_s: float | None = None

    def enqueue(self, launches: int) -> None:
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(launches):
            self._torch.matmul(self._a, self._b, out=self._out)
        last.record()
        self._events.append((first, last))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()
        if self._events:
            self._device_s = sum(a.elapsed_time(b) for a, b in self._events) * 1e-3
            self._events = []

    def device_seconds(self) -> float | None:
        return self._device_s


def tvm_loads(kind: str, folder: str) -> Callable[[float], Load]:
    """Loops of multiply-adds on ``cuda`` or ``cpu``, compiled with TVM: c[i] = sum over k of a[i] b[k]."""
    import tvm.target
    from tvm import te
    from tvm.s_tir import Schedule

    from tvm_energy.kernels.workers import TvmLoad, _load
    from tvm_energy.meta_schedule.build import build_library

    rows, steps = (1 << 20, 20_000) if kind == "cuda" else (1 << 10, 2_000)

    def make(work: float) -> Load:
        length = round(steps * (1 + work))
        a, b = te.placeholder((rows,), name="a"), te.placeholder((length,), name="b")
        k = te.reduce_axis((0, length), name="k")
        c = te.compute((rows,), lambda i: te.sum(a[i] * b[k], axis=k), name="c")
        schedule = Schedule(te.create_prim_func([a, b, c]))
        block = schedule.get_sblock("c")
        (i, _) = schedule.get_loops(block)
        outer, inner = schedule.split(i, [None, 128])
        # The sum stays in a register.
        schedule.reverse_compute_at(schedule.cache_write(block, 0, "local"), inner)
        if kind == "cuda":
            schedule.bind(outer, "blockIdx.x")
            schedule.bind(inner, "threadIdx.x")
            target = tvm.target.Target.from_device(tvm.runtime.device("cuda", 0))
        else:
            target = tvm.target.Target("llvm")
        path = build_library(schedule.mod, target, folder)
        arguments = [((rows,), "float32"), ((length,), "float32"), ((rows,), "float32")]
        return TvmLoad(*_load(path, kind, arguments, seed=0))

    return make


@contextlib.contextmanager
def loads(kind: str) -> Iterator[tuple[str, Callable[[float], Load]]]:
    """The load's full name, and what makes it (with that much more work)."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "auto":
            kind = _installed_load()
        if kind == "sleep":
            yield "sleep (no device: for a stand-in library)", SleepLoad
        elif kind == "torch":
            yield "torch: half-precision matrix product of 4096", TorchLoad
        elif kind == "tvm-cpu":
            yield "tvm: multiply-adds on the processor", tvm_loads("cpu", folder)
        else:
            yield "tvm: multiply-adds", tvm_loads("cuda", folder)


def _installed_load() -> str:
    reasons = []
    try:
        import tvm

        if tvm.runtime.device("cuda", 0).exist:
            return "tvm"
        reasons.append(
            "TVM finds no CUDA device (its driver libraries, or cuda-bindings, are missing)"
        )
    except Exception as exc:
        reasons.append(f"TVM cannot be used ({type(exc).__name__}: {exc})")
    try:
        import torch

        if torch.cuda.is_available():
            return "torch"
        reasons.append("PyTorch finds no CUDA device")
    except Exception as exc:
        reasons.append(f"PyTorch cannot be used ({type(exc).__name__}: {exc})")
    raise ConfigurationError(f"nothing can keep the GPU busy: {'; '.join(reasons)}")


# ---- steps --------------------------------------------------------------------------------------


def opened(gpu: str | int | None) -> dict[str, NvmlMeter]:
    """A meter for each sensor that this GPU has."""
    meters = {}
    for name in SENSORS:
        with contextlib.suppress(MeterUnavailable):
            meters[name] = open_nvml_meter(gpu, field=name)  # type: ignore[arg-type]
    if not meters:
        meters["counter"] = open_nvml_meter(gpu)  # raises with the reason
    return meters


def update_period(meters: dict[str, NvmlMeter], make: Callable[[float], Load], e: Effort) -> Any:
    """Time between changes of each sensor while the load runs."""
    result = {}
    for name, meter in meters.items():
        busy = _busy(make(0.0), meter)
        readings = [busy.read(0.0)]
        while readings[-1].time_s - readings[0].time_s < e.watch_s:
            readings.append(busy.read(POLL_S / 2))
        busy.finish_chunk()
        changes_s = [
            later.time_s
            for earlier, later in pairwise(readings)
            if _value(earlier) != _value(later)
        ]
        gaps_ms = sorted(1e3 * (later - earlier) for earlier, later in pairwise(changes_s))
        calls_s = [_call_s(meter) for _ in range(20)]
        result[name] = {
            "changes": len(changes_s),
            "median_ms": round(statistics.median(gaps_ms), 2) if gaps_ms else None,
            "shortest_ms": round(gaps_ms[0], 2) if gaps_ms else None,
            "longest_ms": round(gaps_ms[-1], 2) if gaps_ms else None,
            "when_opened_ms": round(1e3 * meter.info.update_period_s, 2),
            "call_us": round(1e6 * statistics.median(calls_s), 1),
        }
    return result


def counter_and_power(
    meters: dict[str, NvmlMeter], make: Callable[[float], Load], e: Effort
) -> Any:
    """The power that each sensor shows for the same time, under load and at idle."""
    first = next(iter(meters.values()))
    busy = _busy(make(0.0), first)
    started_s = first.time.now()
    while first.time.now() - started_s < 1.2 * min(1.0, e.load_s):  # the mean of a second forgets
        busy.read(POLL_S)
    under_load = _together(meters, lambda: busy.read(POLL_S), e.load_s)
    state = busy.state()
    busy.finish_chunk()
    first.time.sleep(e.idle_s)
    idle = _together(meters, lambda: first.time.sleep(POLL_S), e.idle_s)
    limit_w = first.info.max_power_w
    powers_w = [power for power in under_load.values() if power is not None]
    return {
        "load_w": under_load,
        "idle_w": idle,
        "largest_difference": round(max(powers_w) / min(powers_w) - 1, 4) if powers_w else None,
        "power_limit_w": limit_w,
        "above_idle": all(
            power > (idle[name] or 0) for name, power in under_load.items() if power is not None
        ),
        "clock_mhz": state.clock_mhz,
        "temperature_c": state.temperature_c,
        "throttle_reasons": list(state.throttle_reasons),
        "notes": list(first.info.notes),
    }


def repeatability(meters: dict[str, NvmlMeter], make: Callable[[float], Load], e: Effort) -> Any:
    """The same kernel again and again."""
    meter, load = next(iter(meters.values())), make(0.0)
    results = [measure(load, meter, e.plan) for _ in range(e.repeats)]
    energies_j = [result.energy_j for result in results]
    mean_j = statistics.fmean(energies_j)
    stated = math.sqrt(statistics.fmean(result.relative_stderr**2 for result in results))
    return {
        "method": meter.info.method,
        "energy_j": mean_j,
        "power_w": round(statistics.fmean(result.power_w for result in results), 2),
        "latency_s": statistics.fmean(result.latency_s for result in results),
        "scatter": round(statistics.stdev(energies_j) / mean_j, 5),
        "latency_scatter": round(_scatter([result.latency_s for result in results]), 5),
        "stated_stderr": round(stated, 5),
        "within_two_stderr_of_the_mean": sum(
            abs(result.energy_j - mean_j) <= 2 * result.stderr_j for result in results
        )
        / len(results),
        "seconds_each": round(statistics.fmean(result.device_s for result in results), 2),
        "measurements": [result.to_json() for result in results],
    }


def two_kernels(meters: dict[str, NvmlMeter], make: Callable[[float], Load], e: Effort) -> Any:
    """Which difference is told apart when two kernels are measured interleaved in so many seconds."""
    meter = next(iter(meters.values()))
    base = make(0.0)
    plan = MeasurementPlan(
        warmup_s=e.plan.warmup_s,
        window_s=e.plan.window_s,
        max_windows=100,
        target_relative_stderr=1e-6,  # use all of the time
        budget_s=e.pair_s / 2,
    )
    pairs = []
    for work in e.more_work:
        first, second = measure_interleaved([base, make(work)], meter, plan)
        if not isinstance(first, EnergyMeasurement) or not isinstance(second, EnergyMeasurement):
            pairs.append({"more_work": work, "error": str(first), "other_error": str(second)})
            continue
        difference = second.energy_j / first.energy_j - 1
        stderr = math.hypot(first.relative_stderr, second.relative_stderr)
        pairs.append(
            {
                "more_work": work,
                "difference": round(difference, 5),
                "stderr": round(stderr, 5),
                "told_apart": abs(difference) > 2 * stderr,
                "windows": first.windows + second.windows,
                "seconds": round(first.device_s + second.device_s, 2),
            }
        )
    measured = [pair for pair in pairs if "difference" in pair]
    equal = [pair for pair in measured if pair["more_work"] == 0]
    unequal = [pair for pair in measured if pair["more_work"] > 0]
    told = [pair["more_work"] for pair in unequal if pair["told_apart"] and pair["difference"] > 0]
    missed = [pair["more_work"] for pair in unequal if pair["more_work"] not in told]
    return {
        "seconds": e.pair_s,
        "smallest_told_apart": min((w for w in told if w > max(missed, default=0.0)), default=None),
        "equal_kernels_told_apart": sum(pair["told_apart"] for pair in equal),
        "expected_resolution": round(2 * statistics.median(p["stderr"] for p in measured), 5)
        if measured
        else None,
        "pairs": pairs,
    }


Step = Callable[[dict[str, NvmlMeter], Callable[[float], Load], Effort], Any]
STEPS: tuple[tuple[str, Step, str, Callable[[Effort], float]], ...] = (
    (
        "update_period",
        update_period,
        "poll each sensor under load and time its changes",
        lambda e: 3 * e.watch_s,
    ),
    (
        "counter_and_power",
        counter_and_power,
        "compare counter, instant and averaged power under load and at idle",
        lambda e: 2 * e.load_s + 2 * e.idle_s,
    ),
    (
        "repeatability",
        repeatability,
        "measure one kernel again and again",
        lambda e: e.repeats * min(2.0, e.plan.budget_s),
    ),
    (
        "two_kernels",
        two_kernels,
        "find the smallest energy difference that is told apart",
        lambda e: len(e.more_work) * e.pair_s,
    ),
)


def _busy(load: Load, meter: PowerMeter) -> BusyDevice:
    latency_s = calibrate(load, meter, CHUNK_S, meter.time.now() + 30.0)
    return BusyDevice(load, meter, latency_s, CHUNK_S, random.Random(0))


def _together(
    meters: dict[str, NvmlMeter], wait: Callable[[], Any], seconds: float
) -> dict[str, float | None]:
    """Mean power by each sensor over the same time; None where one did not move enough."""
    readings: dict[str, list[Reading]] = {name: [] for name in meters}
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        wait()
        for name, meter in meters.items():
            readings[name].append(meter.read())
    return {name: _mean_w(series) for name, series in readings.items()}


def _mean_w(series: list[Reading]) -> float | None:
    if series[0].energy_j is None:
        return round(integrate_j(series) / (series[-1].time_s - series[0].time_s), 2)
    changes = [later for earlier, later in pairwise(series) if _value(earlier) != _value(later)]
    if len(changes) < 2:
        return None
    return round(
        (_value(changes[-1]) - _value(changes[0])) / (changes[-1].time_s - changes[0].time_s), 2
    )


def _value(reading: Reading) -> float:
    value = reading.power_w if reading.energy_j is None else reading.energy_j
    assert value is not None
    return value


def _call_s(meter: NvmlMeter) -> float:
    before_s = time.perf_counter()
    meter.read()
    return time.perf_counter() - before_s


def _scatter(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


# ---- running ------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All steps that the time limit allows; results of earlier runs are kept."""
    effort = QUICK if arguments.quick else Effort()
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        meters = opened(arguments.gpu)
        for meter in meters.values():
            stack.callback(meter.close)
        info = next(iter(meters.values())).info
        stack.enter_context(device_lock(info.device_uuid))
        # The load must run on the GPU that is measured; CUDA reads this when it starts.
        os.environ["CUDA_VISIBLE_DEVICES"] = info.device_uuid
        load_name, make = stack.enter_context(loads(arguments.load))
        key = {
            "gpu": info.device_name,
            "uuid": info.device_uuid,
            "driver": info.driver_version,
            "load": load_name,
            "quick": arguments.quick,
        }
        result = _earlier(arguments.out, key) or {
            **key,
            "tvm_energy": __version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "sensors": {name: meter.info.to_json() for name, meter in meters.items()},
        }
        say(f"{info.device_name}, driver {info.driver_version}, load: {load_name}")
        for name, step, what, needs_s in STEPS:
            if name in result and "error" not in result[name]:
                say(f"{name}: done in an earlier run")
                continue
            left_s = arguments.time_limit - (time.monotonic() - started_s)
            if needs_s(effort) > left_s:
                say(f"{name}: left out, {left_s:.0f} s are left of --time-limit")
                continue
            say(f"{name}: {what}, about {needs_s(effort):.0f} s")
            begun_s = time.monotonic()
            try:
                result[name] = step(meters, make, effort)
            except MeasurementError as exc:
                result[name] = {"error": str(exc)}
                say(f"{name}: failed: {exc}")
            result[name]["took_s"] = round(time.monotonic() - begun_s, 1)
            _write(arguments.out, result)
        result["complete"] = all(
            name in result and "error" not in result[name] for name, *_ in STEPS
        )
        _write(arguments.out, result)
    return result


def _earlier(path: Path | None, key: dict[str, Any]) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigurationError(f"{path} is no file of results ({exc}); name another") from exc
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in key.items()):
        raise ConfigurationError(
            f"{path} holds results of another card, driver or load; name another file"
        )
    return found


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", help="UUID or NVML's number; the default is CUDA's device 0")
    parser.add_argument(
        "--load",
        default="auto",
        choices=("auto", "tvm", "torch", "sleep", "tvm-cpu"),
        help="what keeps the GPU busy (sleep and tvm-cpu: for a stand-in library)",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds a step")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="default 600")
    parser.add_argument("--out", type=Path, help="file of results; an interrupted run goes on")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    arguments = parser.parse_args()
    if not arguments.time_limit > 0:
        parser.error(f"--time-limit must be positive, got {arguments.time_limit}")
    if arguments.gpu is not None and arguments.gpu.isdecimal():
        arguments.gpu = int(arguments.gpu)

    def say(text: str) -> None:
        print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True)

    try:
        result = check(arguments, say)
    except MeterUnavailable as exc:
        effort = QUICK if arguments.quick else Effort()
        say(f"no GPU is checked: {exc}")
        say("with one, this would be done (nothing is ever set on the card):")
        plan = [f"{name}: {what}, about {needs(effort):.0f} s" for name, _, what, needs in STEPS]
        for line in plan:
            say(f"  {line}")
        print(json.dumps({"gpu": None, "reason": str(exc), "would_do": plan}))
        return 0
    except TvmEnergyError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigurationError) else 1
    except KeyboardInterrupt:
        print("interrupted; with --out the next run goes on from here", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0 if result["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
