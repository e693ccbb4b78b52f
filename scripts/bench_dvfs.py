"""How well five clocks predict the others, on public measurements, and what the choice of a clock wastes.

    python scripts/bench_dvfs.py [--quick] [--json] [--data DIR] [--clocks 5]

For each data set the sampling rule of `tvm_energy.dvfs.sampling` chooses five clocks of a device, without a
look at anything not measured yet; every method is fitted to the same five. Errors are relative, over the clocks
left out, all workloads together. The regret is the measured energy of the clock that a method chooses over the
least measured energy of any clock, less one; `max_regret` is that of the worst workload.

Methods:
    tvm_energy          latency and power in the form that cross-validation chose
    cpu_dvfs            t = w / f, P = kappa f^3: the CPU-DVFS model
    constant_power      t = a / f + c, P = its mean: energy follows time
    kernel_tuner_ridge  t = w / f, P as kernel_tuner/energy/energy.py fits it; chooses the ridge clock

Noise floors, from all clocks: `latency_noise`, `power_noise`: scatter of neighbouring clocks (median and 95th
percentile of the second difference, as the error of one point). `regret_noise`: the greatest regret of the clock
that a smooth curve through *all* clocks chooses, which no method can be blamed for.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arguments import positive

from tvm_energy.dvfs.fitting import fit_latencies, fit_powers
from tvm_energy.dvfs.forms import CPU, CUBIC, OFFSET, Array
from tvm_energy.dvfs.joint import fit_joint_latency, fit_joint_power
from tvm_energy.dvfs.sampling import estimate_energy, first_clocks, next_clock
from tvm_energy.dvfs.separable import solve

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "dvfs"


@dataclass(frozen=True)
class Device:
    """Workloads at the same clocks: clocks (n,), latency and power (R, n), their known standard errors."""

    clock_mhz: Array
    latency_s: Array
    power_w: Array
    latency_noise: float = 0.0
    power_noise: float = 0.0


@dataclass(frozen=True)
class Prediction:
    latency_s: Array
    power_w: Array
    chosen: Array  # index of a clock, each workload


# ---- data sets ------------------------------------------------------------------------------------


def text(path: Path) -> str:
    raw = path.read_bytes()
    return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()


def zeus_stages(data: Path, quick: bool) -> list[Device]:
    """Pipeline stages of Bloom and GPT-3 on an A100; stages with the same profile count once."""
    different: dict[tuple[object, ...], dict[float, tuple[float, float]]] = {}
    for path in sorted(data.glob("zeus/stage_profile_*.csv*")):
        curves: dict[tuple[str, str], dict[float, tuple[float, float]]] = {}
        for row in csv.DictReader(io.StringIO(text(path))):
            curve = curves.setdefault((row["stage"], row["instruction"]), {})
            t, e = float(row["time"]), float(row["energy"])
            curve[float(row["frequency"])] = t, e / t
        different |= {tuple(sorted(curve.items())): curve for curve in curves.values()}
    return same_clocks(list(different.values()))


def kernel_tuner(data: Path, quick: bool) -> list[Device]:
    """An FP32 kernel on an A100 at 81 clocks."""
    devices = []
    for path in sorted(data.glob("kernel_tuner/*81freq.json*")):
        rows = json.loads(text(path))["cache"].values()
        curve = {
            float(row["core_freq"]): (row["time"] / 1e3, float(row["nvml_power"])) for row in rows
        }
        spread = [
            np.std(row["times"], ddof=1) / row["time"] / len(row["times"]) ** 0.5 for row in rows
        ]
        (device,) = same_clocks([curve])
        devices.append(
            Device(device.clock_mhz, device.latency_s, device.power_w, float(np.median(spread)))
        )
    return devices


def gpuptx_rows(data: Path) -> dict[str, Array]:
    """Kernel -> rows of memory MHz, core MHz, time, power."""
    kernels: dict[str, list[list[float]]] = {}
    for path in sorted(data.glob("gpuptxmodel/microbenchmarks_*")):
        name = ""
        for line in text(path).splitlines():
            fields = line.strip().split(",")
            if len(fields) == 1 and fields[0]:
                name = fields[0]
            elif len(fields) >= 5:
                kernels.setdefault(name, []).append([float(field) for field in fields[:4]])
    return {name: np.array(rows) for name, rows in kernels.items()}


def gpuptxmodel(data: Path, quick: bool) -> list[Device]:
    """140 micro kernels on a GTX Titan X; each memory clock is a device of its own."""
    kernels = list(gpuptx_rows(data).values())[:: 5 if quick else 1]
    devices = []
    for memory in sorted({float(row[0]) for rows in kernels for row in rows}):
        curves = [{r[1]: (r[2] / 1e3, r[3]) for r in rows if r[0] == memory} for rows in kernels]
        devices += same_clocks(curves)
    return devices


def msm(data: Path, pattern: str) -> list[Device]:
    devices = []
    for path in sorted(data.glob(f"msm_dvfs/{pattern}*.log*")):
        found = re.findall(
            r"Param=(\d+),Freq=(\d+),Time=([\d.]+) \[ms\],Energy=(\d+) \[mJ\]", text(path)
        )
        runs: dict[str, dict[float, list[tuple[float, float]]]] = {}
        for size, clock, t, e in found:
            points = runs.setdefault(size, {}).setdefault(float(clock), [])
            points.append((float(t) / 1e3, float(e) / 1e3))
        curves, t_noise, e_noise = [], [], []
        for points_by_clock in runs.values():
            curve = {}
            for clock, points in points_by_clock.items():
                values = np.array(points)
                mean = values.mean(axis=0)
                curve[clock] = float(mean[0]), float(mean[1] / mean[0])
                error = values.std(axis=0, ddof=1) / mean / len(values) ** 0.5
                t_noise.append(error[0])
                e_noise.append(error[1])
            curves.append(curve)
        for one in same_clocks(curves):
            devices.append(
                Device(
                    one.clock_mhz,
                    one.latency_s,
                    one.power_w,
                    float(np.median(t_noise)),
                    float(np.median(e_noise)),
                )
            )
    return devices


def msm_cuzk(data: Path, quick: bool) -> list[Device]:
    """Four sizes of a multi-scalar multiplication at 101 clocks, means of 10 repeats."""
    return msm(data, "cuZK")


def msm_icicle(data: Path, quick: bool) -> list[Device]:
    """The same by another library, with runs shorter than the counter's update period."""
    return msm(data, "icicle")[: 1 if quick else None]


def power_limits(data: Path, quick: bool) -> list[Device]:
    """Training under power limits: the limit in watts stands where the clock stands elsewhere."""
    devices = []
    for path in sorted(data.glob("zeus/summary_power_*.csv*")):
        curves: dict[tuple[str, ...], dict[float, tuple[float, float]]] = {}
        for row in csv.DictReader(io.StringIO(text(path))):
            key = tuple(row[name] for name in ("dataset", "network", "batch_size", "optimizer"))
            point = float(row["time_per_epoch"]), float(row["average_power"])
            curves.setdefault(key, {})[float(row["power_limit"])] = point
        devices += same_clocks([curve for curve in curves.values() if len(curve) >= 6])
    return devices


def same_clocks(curves: list[dict[float, tuple[float, float]]]) -> list[Device]:
    """Curves {clock: (latency, power)} grouped by their clocks."""
    groups: dict[tuple[float, ...], list[dict[float, tuple[float, float]]]] = {}
    for curve in curves:
        groups.setdefault(tuple(sorted(curve)), []).append(curve)
    return [
        Device(
            np.array(clocks),
            np.array([[curve[clock][0] for clock in clocks] for curve in members]),
            np.array([[curve[clock][1] for clock in clocks] for curve in members]),
        )
        for clocks, members in groups.items()
    ]


DATA_SETS: dict[str, Callable[[Path, bool], list[Device]]] = {
    "zeus_stage_profile": zeus_stages,
    "kernel_tuner": kernel_tuner,
    "gpuptxmodel": gpuptxmodel,
    "msm_dvfs_cuzk": msm_cuzk,
    "msm_dvfs_icicle": msm_icicle,
    "zeus_power_limit": power_limits,
}


# ---- methods --------------------------------------------------------------------------------------


def choose_clocks(device: Device, count: int) -> list[int]:
    """The clocks that a sweep of this device would measure."""
    measured = first_clocks(device.clock_mhz)
    while len(measured) < min(count, len(device.clock_mhz)):
        following = next_clock(
            device.clock_mhz,
            measured,
            device.latency_s[:, measured],
            device.power_w[:, measured],
        )
        if following is None:
            break
        measured = sorted({*measured, following})
    return measured


def ours(device: Device, measured: list[int]) -> Prediction:
    f = device.clock_mhz
    at, t, p = f[measured], device.latency_s[:, measured], device.power_w[:, measured]
    latency = fit_latencies(at, t, power_w=p, noise=device.latency_noise)
    caps = [curve.cap_mhz for curve in latency]
    power = fit_powers(at, p, cap_mhz=caps, noise=device.power_noise)
    chosen = [
        estimate_energy(f, one, other).chosen for one, other in zip(latency, power, strict=True)
    ]
    return Prediction(
        np.array([curve.predict(f) for curve in latency]),
        np.array([curve.predict(f) for curve in power]),
        np.array(chosen),
    )


def cpu_dvfs(device: Device, measured: list[int]) -> Prediction:
    f = device.clock_mhz
    at, t, p = f[measured], device.latency_s[:, measured], device.power_w[:, measured]
    latency = solve(CPU, at, t, 1 / t**2).predict(CPU, f)
    power = solve(CUBIC, at, p, 1 / p**2).predict(CUBIC, f)
    return Prediction(latency, power, np.argmin(latency * power, axis=1))


def constant_power(device: Device, measured: list[int]) -> Prediction:
    f = device.clock_mhz
    t, p = device.latency_s[:, measured], device.power_w[:, measured]
    latency = solve(OFFSET, f[measured], t, 1 / t**2).predict(OFFSET, f)
    power = np.repeat(p.mean(axis=1, keepdims=True), len(f), axis=1)
    return Prediction(latency, power, np.argmin(latency * power, axis=1))


def kernel_tuner_ridge(device: Device, measured: list[int]) -> Prediction:
    """P / P_min = min(P_max, 1 + gamma/1000 f v^2), f from the lowest clock on, with their start and bounds."""
    from scipy.optimize import OptimizeWarning, curve_fit

    f = device.clock_mhz
    at, t = f[measured], device.latency_s[:, measured]
    latency = solve(CPU, at, t, 1 / t**2).predict(CPU, f)

    def form(x: Array, ridge: float, beta: float, gamma: float, limit: float) -> Array:
        v = np.where(x <= ridge, 1.0, 1 + 1e-3 * beta * (x - ridge))
        return np.minimum(limit, 1 + 1e-3 * gamma * x * v**2)

    powers, chosen = [], []
    for p in device.power_w[:, measured]:
        x, y = at - at[0], p / p.min()
        top = float(y.max())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)
            start = [float(np.median(x)), 1.0, 1.0, top]
            bounds = ([0, 0, 0, 0.9 * top], [float(x[-1]), 1, 1, 1.1 * top])
            try:
                (ridge, *rest), _ = curve_fit(form, x, y, p0=start, bounds=bounds)
            except RuntimeError:  # no convergence: the start is what is left
                ridge, *rest = start
        powers.append(form(f - at[0], ridge, *rest) * p.min())
        chosen.append(int(np.argmin(np.abs(f - at[0] - ridge))))
    return Prediction(latency, np.array(powers), np.array(chosen))


METHODS: dict[str, Callable[[Device, list[int]], Prediction]] = {
    "tvm_energy": ours,
    "cpu_dvfs": cpu_dvfs,
    "constant_power": constant_power,
    "kernel_tuner_ridge": kernel_tuner_ridge,
}


# ---- figures --------------------------------------------------------------------------------------


def figures(
    devices: list[Device], predictions: list[Prediction], left_out: list[Array]
) -> dict[str, float]:
    t, p, regret = [], [], []
    for device, predicted, rest in zip(devices, predictions, left_out, strict=True):
        t.append(np.abs(predicted.latency_s / device.latency_s - 1)[:, rest].ravel())
        p.append(np.abs(predicted.power_w / device.power_w - 1)[:, rest].ravel())
        regret.append(regrets(device, predicted.chosen))
    all_t, all_p, all_regret = (np.concatenate(item) for item in (t, p, regret))
    return {
        "median_latency_error": float(np.median(all_t)),
        "p95_latency_error": float(np.percentile(all_t, 95)),
        "median_power_error": float(np.median(all_p)),
        "p95_power_error": float(np.percentile(all_p, 95)),
        "max_regret": float(all_regret.max()),
        "p95_regret": float(np.percentile(all_regret, 95)),
        "mean_regret": float(all_regret.mean()),
    }


def regrets(device: Device, chosen: Array) -> Array:
    energy = device.latency_s * device.power_w
    return np.asarray(energy[np.arange(len(energy)), chosen] / energy.min(axis=1) - 1)


def noise_floor(devices: list[Device]) -> dict[str, float]:
    """What the data themselves allow; see the top of this file."""
    t, p, regret = [], [], []
    for device in devices:
        t.append(second_difference(device.latency_s * device.clock_mhz))
        p.append(second_difference(device.power_w))
        smooth = local_quadratic(np.log(device.latency_s * device.power_w))
        regret.append(regrets(device, np.argmin(smooth, axis=1)))
    all_t, all_p = np.concatenate(t), np.concatenate(p)
    return {
        "latency_noise": float(np.median(all_t)),
        "p95_latency_noise": float(np.percentile(all_t, 95)),
        "power_noise": float(np.median(all_p)),
        "p95_power_noise": float(np.percentile(all_p, 95)),
        "regret_noise": float(np.concatenate(regret).max()),
    }


def second_difference(values: Array) -> Array:
    """How far each point lies from the line through its neighbours, as the error of one point."""
    middle = (values[:, 2:] + values[:, :-2]) / 2
    return np.asarray(np.abs(values[:, 1:-1] / middle - 1).ravel() / 1.5**0.5)


def local_quadratic(values: Array, width: int = 9) -> Array:
    """A parabola through the nearest points of each point (Savitzky-Golay)."""
    from scipy.signal import savgol_filter

    size = min(width, (values.shape[1] - 1) // 2 * 2 + 1)
    return np.asarray(savgol_filter(values, size, 2, axis=1))


# ---- core and memory clock ------------------------------------------------------------------------

JOINT = "gpuptxmodel_joint"


def joint(data: Path, quick: bool) -> dict[str, dict[str, float]]:
    """Five of the 32 pairs of core and memory clock, the other 27 predicted."""
    kernels = list(gpuptx_rows(data).values())[:: 5 if quick else 1]
    results: dict[str, list[tuple[Array, Array, float]]] = {"tvm_energy": [], "cpu_dvfs": []}
    for rows in kernels:
        memory, core, t, p = rows.T
        t = t / 1e3
        low, high = core.min(), core.max()
        middle = core[np.argmin(np.abs(core - (low + high) / 2))]
        pairs = {(memory.min(), low), (memory.min(), high)}
        pairs |= {(memory.max(), clock) for clock in (low, middle, high)}
        at = np.array([(m, c) in pairs for m, c in zip(memory, core, strict=True)])
        both = [
            fit(core[at], memory[at], values[at]).predict(core, memory)
            for fit, values in ((fit_joint_latency, t), (fit_joint_power, p))
        ]
        single = [
            solve(form, core[at], values[at][None], 1 / values[at][None] ** 2).predict(form, core)[
                0
            ]
            for form, values in ((CPU, t), (CUBIC, p))
        ]
        for name, (t_hat, p_hat) in (("tvm_energy", both), ("cpu_dvfs", single)):
            energy = t * p
            results[name].append(
                (
                    np.abs(t_hat / t - 1)[~at],
                    np.abs(p_hat / p - 1)[~at],
                    float(energy[np.argmin(t_hat * p_hat)] / energy.min() - 1),
                )
            )
    return {
        name: {
            "median_latency_error": float(np.median(np.concatenate([one[0] for one in found]))),
            "p95_latency_error": float(
                np.percentile(np.concatenate([one[0] for one in found]), 95)
            ),
            "median_power_error": float(np.median(np.concatenate([one[1] for one in found]))),
            "p95_power_error": float(np.percentile(np.concatenate([one[1] for one in found]), 95)),
            "max_regret": max(one[2] for one in found),
            "p95_regret": float(np.percentile([one[2] for one in found], 95)),
            "mean_regret": float(np.mean([one[2] for one in found])),
        }
        for name, found in results.items()
    }


# ---- speed ----------------------------------------------------------------------------------------


def fitting_seconds(blocks: int = 200, clocks: int = 100) -> float:
    """Time to fit latency and power of a network's blocks; invented values."""
    rng = np.random.default_rng(0)
    f = np.linspace(300, 1800, clocks)
    t = rng.uniform(0.1, 2, (blocks, 1)) / f + rng.uniform(0, 1e-3, (blocks, 1))
    p = 40 + rng.uniform(0.03, 0.1, (blocks, 1)) * f * (1 + 1e-3 * np.maximum(0, f - 1200)) ** 2
    t, p = (values * np.exp(0.002 * rng.standard_normal(values.shape)) for values in (t, p))
    start = time.perf_counter()
    fit_powers(f, p, cap_mhz=[curve.cap_mhz for curve in fit_latencies(f, t)])
    return time.perf_counter() - start


# ---- the whole ------------------------------------------------------------------------------------


def run(data: Path, quick: bool, count: int) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, load in DATA_SETS.items():
        devices = load(data, quick)
        if not devices:
            print(f"{name}: no files in {data}", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr)
        measured = [choose_clocks(device, count) for device in devices]
        left_out = [
            np.setdiff1d(np.arange(len(device.clock_mhz)), chosen)
            for device, chosen in zip(devices, measured, strict=True)
        ]
        entry: dict[str, object] = {
            method: figures(
                devices,
                [predict(device, at) for device, at in zip(devices, measured, strict=True)],
                left_out,
            )
            for method, predict in METHODS.items()
        }
        entry["noise"] = noise_floor(devices)
        entry["workloads"] = sum(len(device.latency_s) for device in devices)
        entry["clocks"] = [
            device.clock_mhz[at].tolist() for device, at in zip(devices, measured, strict=True)
        ]
        result[name] = entry
    if gpuptx_rows(data):
        result[JOINT] = joint(data, quick)
    return result


def lines(result: dict[str, object]) -> Iterator[str]:
    yield f"{'data set':20} {'method':19} {'latency med':>11} {'p95':>7} {'power med':>10} {'p95':>7} {'regret max':>11} {'p95':>7} {'mean':>7}   %"
    for name, entry in result.items():
        if not isinstance(entry, dict):
            continue
        for method, found in entry.items():
            if method in METHODS:
                yield (
                    f"{name:20} {method:19} {100 * found['median_latency_error']:11.2f}"
                    f" {100 * found['p95_latency_error']:7.2f} {100 * found['median_power_error']:10.2f}"
                    f" {100 * found['p95_power_error']:7.2f} {100 * found['max_regret']:11.2f}"
                    f" {100 * found['p95_regret']:7.2f} {100 * found['mean_regret']:7.2f}"
                )
        if "noise" in entry:
            floor = entry["noise"]
            yield (
                f"{name:20} {'(noise floor)':19} {100 * floor['latency_noise']:11.2f}"
                f" {100 * floor['p95_latency_noise']:7.2f} {100 * floor['power_noise']:10.2f}"
                f" {100 * floor['p95_power_noise']:7.2f} {100 * floor['regret_noise']:11.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the data sets, same keys")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of tables")
    parser.add_argument("--clocks", type=positive, default=5, help="clocks that are measured")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"--data {arguments.data} is not a folder")
    if arguments.clocks < 4:
        parser.error("--clocks must be 4 at least")
    result = run(arguments.data, arguments.quick, arguments.clocks)
    if not result:
        parser.exit(1, f"no known table in {arguments.data}\n")
    seconds = min(fitting_seconds() for _ in range(3))
    for line in lines(result):
        print(line)
    print(f"fitting latency and power of 200 blocks over 100 clocks: {seconds:.2f} s")
    if arguments.json:
        print(json.dumps({"data_sets": result, "fit_200_blocks_s": seconds, **result}))


if __name__ == "__main__":
    main()
