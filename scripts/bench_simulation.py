"""Checks simulated devices against public measurements, and says how far they are off.

    python scripts/bench_simulation.py [--quick] [--json]

h200_gemm, h200_decode_attention, h200_encoder_attention
    shapes on sim:h200 against measured latency and power. The library's kernels are not known; scripts/library_kernels.py
    describes well-tiled ones, of a product the fastest tiling. Half of the rows (drawn by seed) is for
    calibration; what is reported is the other half. *Good* rows are those whose measured kernel reaches half of the best
    rate of operations in the set (or of half the data sheet's, if that is more) or half of the memory's peak; the goals are about
    them. `power_neighbour` is how much the measured power of a row differs
    from that of the row with the closest rates of operations and bytes (median): about 0.7 of it, as both
    rows scatter, is left to a perfect model of these rates.
a100_fma        power of a multiply-add loop at the 71 clocks that the simulation was not fitted to
a100_training   pipeline stages of two networks, A100 SXM: time and energy relative to the highest clock, against a large
                product on sim:a100 with the limit of that part, 400 W
unnamed_msm     the same for a multi-scalar multiplication on a GPU that is not named, against a multiply-add loop on
                sim:a100 at the same part of the highest clock: the form of the curve only
older_power_form  the form of the power equation, fitted for each older part to half of its micro kernels, on the others
latency_spaces  share of kernels within 5, 20, 50 % and 2 x of the fastest: exhaustive spaces, and random candidates simulated
energy_spread   differences in energy among kernels within 5 % in latency: measured, and simulated with and without
                the unexplained factors

Only h200 and a100 can be checked: there is no simulated B200, and no public measurement of the others was found. Errors
are absolute and relative to the measured value. Goals: power 15 %, latency of good kernels 30 %, rank correlation
over shapes at least 0.9.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import itertools
import json
import lzma
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import candidate_pools
import clock_pools
import library_kernels
import numpy as np

from tvm_energy.simulation import gpu
from tvm_energy.simulation.devices import A100, H200, DeviceSpec, find_device
from tvm_energy.simulation.gpu import KernelTruth, simulate
from tvm_energy.simulation.kernel import Instructions, KernelLaunch, KernelWork

HERE = Path(__file__).resolve().parent
DATA = HERE / "data" / "simulation"
CLOCKS = HERE.parent / "tests" / "data" / "dvfs"
GOALS = {"power": 0.15, "latency": 0.30, "rank": 0.9}
_WITHIN = (1.05, 1.2, 1.5, 2.0)
_TENSOR_PEAK = 989e12  # data sheet of the H200, dense bfloat16


def read_rows(path: Path) -> list[dict[str, float]]:
    """A CSV file (.xz) of numbers."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


# ---- shapes on the H200 ---------------------------------------------------------------------------


def gemm_truth(spec: DeviceSpec, row: dict[str, float]) -> KernelTruth:
    works = library_kernels.gemms(int(row["m"]), int(row["n"]), int(row["k"]))
    return min((simulate(spec, work) for work in works), key=lambda truth: truth.latency_s)


def gemm_demand(row: dict[str, float]) -> tuple[float, float]:
    m, n, k = row["m"], row["n"], row["k"]
    return 2 * m * n * k, 2 * (m * n + n * k + m * k)


def decode_truth(spec: DeviceSpec, row: dict[str, float]) -> KernelTruth:
    names = ("batch_size", "num_heads", "num_key_value_heads", "head_dim")
    sizes = [int(row[name]) for name in names]
    return simulate(spec, library_kernels.decode_attention(*sizes, int(row["step"]) + 1))


def decode_demand(row: dict[str, float]) -> tuple[float, float]:
    pairs, each = row["batch_size"] * row["num_key_value_heads"], row["head_dim"]
    return (
        4 * row["batch_size"] * row["num_heads"] * (row["step"] + 1) * each,
        4 * pairs * (row["step"] + 1) * each,
    )


def encoder_truth(spec: DeviceSpec, row: dict[str, float]) -> KernelTruth:
    sizes = [int(row[name]) for name in ("batch_size", "isl", "num_heads", "head_dim")]
    return simulate(spec, library_kernels.encoder_attention(*sizes))


def encoder_demand(row: dict[str, float]) -> tuple[float, float]:
    heads = row["batch_size"] * row["num_heads"]
    return 4 * heads * row["isl"] ** 2 * row["head_dim"], 8 * heads * row["isl"] * row["head_dim"]


Truth = Callable[[DeviceSpec, dict[str, float]], KernelTruth]
Demand = Callable[[dict[str, float]], tuple[float, float]]
SHAPES: dict[str, tuple[Path, Truth, Demand]] = {
    "h200_gemm": (HERE / "data" / "h200_gemm.csv.xz", gemm_truth, gemm_demand),
    "h200_decode_attention": (
        DATA / "h200_decode_attention.csv.xz",
        decode_truth,
        decode_demand,
    ),
    "h200_encoder_attention": (
        DATA / "h200_encoder_attention.csv.xz",
        encoder_truth,
        encoder_demand,
    ),
}


def shape_rows(name: str, part: str, count: int) -> list[dict[str, float]]:
    """Up to ``count`` rows of 20 us and longer; ``part`` is "calibrate" or "check"."""
    rows = [row for row in read_rows(SHAPES[name][0]) if row["latency_ms"] >= 0.02]
    order = np.random.default_rng(0).permutation(len(rows))
    half = order[: len(rows) // 2] if part == "calibrate" else order[len(rows) // 2 :]
    return [rows[i] for i in half[:count]]


def check_shapes(
    name: str, count: int, *, part: str = "check", spec: DeviceSpec = H200
) -> dict[str, Any]:
    """Errors over all rows, and over good ones."""
    _, truth_of, demand_of = SHAPES[name]
    rows = shape_rows(name, part, count)
    truths = [truth_of(spec, row) for row in rows]
    measured_s = np.array([row["latency_ms"] * 1e-3 for row in rows])
    measured_w = np.array([row["power_w"] for row in rows])
    demand = np.array([demand_of(row) for row in rows])
    rates = demand / measured_s[:, None]
    # Attention cannot reach the data sheet's peak: exponentials stand between its two products.
    peak = max(float(rates[:, 0].max()), _TENSOR_PEAK / 2)
    good = (rates / (peak, spec.dram_bytes_per_s)).max(axis=1) >= 0.5
    simulated_s = np.array([truth.latency_s for truth in truths])
    simulated_w = np.array([truth.power_w for truth in truths])
    groups = {"all": np.ones(len(rows), bool), "good": good}
    groups["good_compute"] = good & (rates[:, 0] / peak >= 0.5)
    groups["good_memory"] = good & ~groups["good_compute"]
    return {
        group: compare(
            simulated_s[chosen], measured_s[chosen], simulated_w[chosen], measured_w[chosen]
        )
        | {"power_neighbour": neighbour_error(rates[chosen], measured_w[chosen])}
        for group, chosen in groups.items()
        if chosen.sum() >= 10
    }


def compare(
    simulated_s: np.ndarray, measured_s: np.ndarray, simulated_w: np.ndarray, measured_w: np.ndarray
) -> dict[str, float]:
    """Errors of latency, power and energy of the same rows, and rank correlations."""
    found: dict[str, float] = {"rows": len(measured_s)}
    for name, simulated, measured in (
        ("latency", simulated_s, measured_s),
        ("power", simulated_w, measured_w),
        ("energy", simulated_s * simulated_w, measured_s * measured_w),
    ):
        error = np.abs(simulated / measured - 1)
        found |= {
            f"{name}_error": float(np.median(error)),
            f"{name}_mean_error": float(error.mean()),
            f"{name}_ratio": float(np.median(simulated / measured)),
            f"{name}_rank": rank_correlation(simulated, measured),
        }
        if name in GOALS:
            found[f"{name}_within_goal"] = float((error <= GOALS[name]).mean())
    return found


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def neighbour_error(rates: np.ndarray, watts: np.ndarray) -> float:
    """Median relative difference of power between each row and the one nearest in both rates."""
    from scipy.spatial import cKDTree

    points = np.log(np.maximum(rates / (_TENSOR_PEAK, H200.dram_bytes_per_s), 1e-3))
    found = cKDTree(points).query(points, k=2)[1]
    # Where two rows have equal rates, a row may come second to the other.
    nearest = np.where(found[:, 0] == np.arange(len(points)), found[:, 1], found[:, 0])
    return float(np.median(np.abs(watts[nearest] / watts - 1)))


# ---- clocks --------------------------------------------------------------------------------------


def fma_loop(spec: DeviceSpec) -> KernelWork:
    """Nothing but fused multiply-adds, 2048 threads on each multiprocessor."""
    launch = KernelLaunch(
        name="fma_loop",
        blocks=2 * spec.sms,
        threads_per_block=1024,
        ilp=4,
        instructions=Instructions(fma32=5.98e10, control=5.98e10 / 64),
    )
    return KernelWork(launches=(launch,))


def check_fma() -> dict[str, Any]:
    """The clocks of the table of 81 that are not in the table of 10, which was fitted."""
    folder = CLOCKS / "kernel_tuner"
    name = "synthetic_fp32_cache_NVIDIA_A100-PCIE-40GB"
    fitted = json.loads((folder / f"{name}_10freq.json").read_text())["cache"].values()
    seen = {item["nvml_gr_clock"] for item in fitted}
    with lzma.open(folder / f"{name}_81freq.json.xz", "rt") as file:
        rows = [r for r in json.load(file)["cache"].values() if r["nvml_gr_clock"] not in seen]
    work = fma_loop(A100)
    truths = [simulate(A100, work, clock_mhz=row["core_freq"]) for row in rows]
    watts = np.array([row["nvml_power"] for row in rows])
    seconds = np.array([row["time"] for row in rows])
    mine_w = np.array([truth.power_w for truth in truths])
    # The kernel's number of operations is not in the file: times relative to the middle of each curve.
    mine_s = np.array([truth.latency_s for truth in truths])
    return compare(mine_s / np.median(mine_s), seconds / np.median(seconds), mine_w, watts)


def check_stages() -> dict[str, Any]:
    """Energy and time of training stages over the clock, relative to the highest clock."""
    spec = dataclasses.replace(A100, power_limit_w=400.0)
    work = library_kernels.gemm(4096, 12288, 12288, 128, 256)
    simulated = {f: simulate(spec, work, clock_mhz=f) for f in spec.clocks_mhz}
    groups = []
    for path in sorted((CLOCKS / "zeus").glob("stage_profile_*.csv.xz")):
        with lzma.open(path, "rt") as file:
            rows = list(csv.DictReader(file))
        for key in sorted({(row["stage"], row["instruction"]) for row in rows}):
            of_key = [row for row in rows if (row["stage"], row["instruction"]) == key]
            curve = [(float(r["frequency"]), float(r["time"]), float(r["energy"])) for r in of_key]
            if curve not in groups:  # the source repeats some stages
                groups.append(curve)
    return _relative(groups, lambda clock: simulated[spec.nearest_clock_mhz(clock)])


def check_msm() -> dict[str, Any]:
    """Runs of 0.2 s and longer at 101 clocks; the counter's steps are averaged over ten repeats."""
    pattern = re.compile(r"Param=(\d+),Freq=(\d+),Time=([\d.]+) \[ms\],Energy=(\d+)")
    with lzma.open(CLOCKS / "msm_dvfs" / "cuZK_energy.log.xz", "rt") as file:
        found = pattern.findall(file.read())
    table: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for size, clock, ms, mj in found:
        table.setdefault((int(size), int(clock)), []).append((float(ms), float(mj)))
    groups = []
    for size in sorted({size for size, _ in table}):
        curve = [
            (float(clock), *np.mean(values, axis=0))
            for (other, clock), values in sorted(table.items())
            if other == size
        ]
        if min(seconds for _, seconds, _ in curve) >= 1000:  # many steps of the counter
            groups.append(curve)
    work, top = fma_loop(A100), max(clock for curve in groups for clock, _, _ in curve)
    return _relative(
        groups, lambda clock: simulate(A100, work, clock_mhz=clock / top * A100.max_clock_mhz)
    )


def _relative(
    curves: list[list[tuple[float, float, float]]], truth_of: Callable[[float], KernelTruth]
) -> dict[str, Any]:
    """Time, power and energy over those at the highest clock; and the clocks of least energy, as parts of it."""
    mine_s, mine_w, real_s, real_w, best = [], [], [], [], []
    for curve in curves:
        truths = [truth_of(clock) for clock, _, _ in curve]
        top = max(range(len(curve)), key=lambda i: curve[i][0])
        for (_, seconds, joules), truth in zip(curve, truths, strict=True):
            mine_s.append(truth.latency_s / truths[top].latency_s)
            mine_w.append(truth.power_w / truths[top].power_w)
            real_s.append(seconds / curve[top][1])
            real_w.append(joules / seconds / (curve[top][2] / curve[top][1]))
        cheapest = min(range(len(curve)), key=lambda i: truths[i].energy_j)
        best.append((curve[cheapest][0], min(curve, key=lambda item: item[2])[0], curve[top][0]))
    means = np.mean(best, axis=0)
    return compare(*(np.array(x) for x in (mine_s, real_s, mine_w, real_w))) | {
        "curves": len(curves),
        "best_clock_simulated": float(means[0] / means[2]),
        "best_clock_measured": float(means[1] / means[2]),
    }


# ---- power over utilisation ----------------------------------------------------------------------


def check_power_form(name: str) -> dict[str, float]:
    """The simulation's power equation, its constants fitted to half of the kernels of one older part.

    constant + static v^2 + f v^2 (clock tree + sum of units) + memory clock (standby + DRAM), v flat to a ridge, then
    linear: as `DeviceSpec.voltage`. Constants are not negative.
    """
    from scipy.optimize import nnls

    with lzma.open(DATA / f"{name}.csv.xz", "rt") as file:
        lines = file.read().splitlines()
    core, memory = (float(x) for x in lines[1].split(","))
    table = np.array([[float(x) for x in line.split(",")] for line in lines[4:] if line.strip()])
    watts, f, fm, use = table[:, 0], table[:, 1] / core, table[:, 2] / memory, table[:, 3:]
    _, kernel = np.unique(use.round(6), axis=0, return_inverse=True)
    kernel = kernel.ravel()
    half = np.random.default_rng(0).permutation(kernel.max() + 1) < (kernel.max() + 1) // 2
    fit = half[kernel]
    best: tuple[float, np.ndarray] = (math.inf, watts)
    for ridge, rise in itertools.product((0.5, 0.6, 0.7, 0.8, 0.9), (0.0, 0.1, 0.2, 0.3, 0.4)):
        span = max(f.max() - ridge, 1e-9)
        v2 = (1 + rise * np.maximum(0, f - ridge) / span) ** 2
        columns = [np.ones_like(f), v2, f * v2, fm, fm * use[:, -1]]
        columns += [f * v2 * use[:, i] for i in range(use.shape[1] - 1)]
        design = np.stack(columns, axis=1)
        weights, loss = nnls(design[fit] / watts[fit, None], np.ones(fit.sum()))
        if loss < best[0]:
            best = (loss, design @ weights)
    error = np.abs(best[1] / watts - 1)[~fit]
    return {
        "kernels": int(kernel.max() + 1),
        "rows_checked": len(error),
        "power_error": float(np.median(error)),
        "power_mean_error": float(error.mean()),
        "power_within_goal": float((error <= GOALS["power"]).mean()),
        "power_rank": rank_correlation(best[1][~fit], watts[~fit]),
    }


# ---- spaces of kernels ---------------------------------------------------------------------------


def check_spaces() -> dict[str, Any]:
    """How common kernels near the fastest are."""
    rows = read_rows(DATA / "benchmark_hub_quantiles.csv.xz")
    found: dict[str, Any] = {"measured": {}, "simulated": {}}
    for name in rows[0]:
        if name != "quantile":
            found["measured"][name] = _shares(np.array([row[name] for row in rows]))
    devices = ["a100", "h200"]
    pools = candidate_pools.load(HERE / "data" / "candidate_pools.npz", devices)
    for device, (name, pool) in itertools.product(devices, pools.items()):
        latency, random = pool.latency_s[device], pool.round < 4
        found["simulated"][f"{device} {name}"] = _shares(latency[random], latency.min())
    return found


def _shares(latency: np.ndarray, fastest: float | None = None) -> dict[str, float]:
    ratio = latency / (latency.min() if fastest is None else fastest)
    shares = {f"within_{limit:g}x": float((ratio <= limit).mean()) for limit in _WITHIN}
    return shares | {"median": float(np.median(ratio)), "p90": float(np.quantile(ratio, 0.9))}


def check_spread() -> dict[str, Any]:
    """Energy of kernels for the same work that are within 5 % in latency."""
    moe = read_rows(DATA / "b200_moe_pairs.csv.xz")
    pairs = np.array(
        [
            (
                row[f"{kind}_latency_ms"],
                row[f"{kind}_power_w"] * row[f"{kind}_latency_ms"],
            )
            for row in moe
            for kind in ("cutlass", "min_latency")
        ]
    ).reshape(-1, 2, 2)
    vector = read_rows(DATA / "vector_add_rtx4000ada.csv.xz")
    blocks = [(row["time_ms"], row["energy_j"]) for row in vector]
    found: dict[str, Any] = {
        "measured, B200 MoE, two kernels of each shape": pair_spread(pairs),
        "measured, RTX 4000 Ada vector_add, 15 block sizes": pair_spread([np.array(blocks)]),
    }
    works = clock_pools.load()
    for device in ("a100", "rtx4090", "orin-nano"):
        spec = find_device(device)
        found[f"simulated, {device}"] = _simulated_spread(spec, works)
        with mock.patch.multiple(gpu, ENERGY_SPREAD=0.0, TIME_SPREAD=0.0):
            found[f"simulated, {device}, no unexplained factors"] = _simulated_spread(spec, works)
    return found


def _simulated_spread(spec: DeviceSpec, works: dict[str, list[KernelWork]]) -> dict[str, float]:
    pools = []
    for kernels in works.values():
        costs = np.array(
            [(t.latency_s, t.energy_j) for t in (simulate(spec, work) for work in kernels)]
        )
        # The search's interest: kernels up to twice as slow as the best.
        pools.append(costs[costs[:, 0] <= 2 * costs[:, 0].min()])
    return pair_spread(pools)


def pair_spread(pools: Iterable[np.ndarray]) -> dict[str, float]:
    """Ratios of energy (larger over smaller, less one) of all pairs of one pool within 5 % in latency."""
    ratios = [
        max(b[1] / a[1], a[1] / b[1]) - 1
        for pool in pools
        for a, b in itertools.combinations(pool, 2)
        if abs(math.log(b[0] / a[0])) <= math.log(1.05)
    ]
    if not ratios:
        return {"pairs": 0}
    median, p90, largest = np.quantile(ratios, [0.5, 0.9, 1.0])
    # Of two independent log-normal values: what spread of one kernel gives such pairs.
    sigma = math.sqrt(float(np.mean(np.log1p(ratios) ** 2)) / 2)
    return {
        "pairs": len(ratios),
        "median": float(median),
        "p90": float(p90),
        "largest": float(largest),
        "sigma": sigma,
    }


# ---- report --------------------------------------------------------------------------------------


def run(quick: bool) -> dict[str, Any]:
    """Everything; ``quick`` takes fewer rows."""
    count = 150 if quick else 1000
    checks: dict[str, Callable[[], Any]] = {
        **{name: lambda name=name: check_shapes(name, count) for name in SHAPES},
        "a100_fma": check_fma,
        "a100_training": check_stages,
        "unnamed_msm": check_msm,
        "older_power_form": lambda: {
            name: check_power_form(name)
            for name in ("micro_gtxtitanx", "micro_titanxp", "micro_teslak40c")
        },
        "latency_spaces": check_spaces,
        "energy_spread": check_spread,
    }
    results: dict[str, Any] = {}
    for name, check in checks.items():
        started = time.monotonic()
        results[name] = check()
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return results


def table(results: Any, depth: int = 0) -> str:
    """Nested results as indented lines."""
    out = io.StringIO()
    flat = {k: v for k, v in results.items() if not isinstance(v, dict)}
    if flat:
        cells = "  ".join(f"{k} {v:.3g}" if v < 1e4 else f"{k} {v:.0f}" for k, v in flat.items())
        out.write("  " * depth + cells + "\n")
    for name, value in results.items():
        if isinstance(value, dict):
            out.write("  " * depth + name + "\n" + table(value, depth + 1))
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="150 shapes of each set, not 1000")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    results = run(options.quick)
    print(table(results))
    if options.json:
        print(json.dumps({"goals": GOALS, "simulated": True, **results}))


if __name__ == "__main__":
    main()
