"""What choosing kernel and clock together saves, over choosing one after the other and over either alone.

Pools of real MetaSchedule kernels (``scripts/clock_pools.py``), each simulated at every clock of a device, without
noise. Least energy with latency <= (1 + slack) x that of the fastest kernel at the default clock:

fastest            the fastest kernel at the default clock: what everything is compared with
kernel             any kernel, default clock
clock              the fastest kernel, any clock
kernel_then_clock  the kernel of ``kernel``, then any clock for it
joint              any kernel at any clock: the best there is
found              what ``tune --clocks 5`` finds: the finalists (the 4 best at the default clock and the fastest) at up
                   to 5 locked clocks and a confirmation, with measuring noise (1 % x sqrt(1 s / window) on energy,
                   0.1 % on latency); its choice is then evaluated without noise

``network`` is made of all workloads, each called so often that all take the same energy; one clock for all, slack on
the whole; ``per_kernel`` has a clock for each kernel (changes of the clock not counted). Every number is simulated.
The last line of stdout is one JSON object: for each device ``workloads`` (name, slack, choice: ``energy_ratio`` and
``latency_ratio`` to ``fastest``, ``clock_mhz``), ``geomean_energy_ratio`` and ``network`` by slack and choice, and
``joint_below_sequential``, the geometric mean of joint / kernel_then_clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from clock_pools import DEVICES, load

from tvm_energy.clock_choice import ONE, PER_KERNEL, best_options
from tvm_energy.clock_search import ClockSearch
from tvm_energy.energy_model.base import Prediction, Sample
from tvm_energy.measurement import FINALIST_PLAN, EnergyMeasurement, MeasurementPlan
from tvm_energy.objective import SlowdownBound
from tvm_energy.policy import parse_policy
from tvm_energy.session import Candidate, Order, Session
from tvm_energy.simulation.devices import DeviceSpec, find_device
from tvm_energy.simulation.gpu import simulate
from tvm_energy.simulation.kernel import KernelWork

SLACKS = (0.0, 0.05, 0.1, 0.25)
CHOICES = ("kernel", "clock", "kernel_then_clock", "joint", "found")
CLOCKS = 5
FINALISTS = 4
WINDOW_NOISE = 0.01  # of a window of 1 s
LATENCY_NOISE = 0.001


@dataclass(frozen=True)
class Pool:
    """Kernels of one workload on one device.

    Attributes:
        name: of the workload.
        clocks_mhz: shape (c,); what the last column stands for is the default clock.
        latency_s, energy_j, effective_mhz: without noise, shape (kernels, c + 1).
    """

    name: str
    clocks_mhz: np.ndarray
    latency_s: np.ndarray
    energy_j: np.ndarray
    effective_mhz: np.ndarray

    @property
    def fastest(self) -> int:
        return int(np.argmin(self.latency_s[:, -1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three workloads, two slacks")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--devices", default=",".join(f"sim:{name}" for name in DEVICES))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    slacks = SLACKS[1::2] if options.quick else SLACKS
    works = dict(list(load().items())[: 3 if options.quick else None])
    result: dict[str, Any] = {"simulated": True, "slacks": slacks, "clocks": CLOCKS}
    for device in options.devices.split(","):
        spec = find_device(device.removeprefix("sim:"))
        pools = [pool_of(spec, name, kernels) for name, kernels in works.items()]
        result[device] = study(pools, slacks, options.seed)
        if not options.json:
            show(device, result[device])
    print(json.dumps(result))


def pool_of(spec: DeviceSpec, name: str, works: Sequence[KernelWork]) -> Pool:
    """Every kernel at every clock and at the default one."""
    clocks = np.array(spec.clocks_mhz, dtype=float)
    truths = [
        [simulate(spec, work, clock_mhz=clock) for clock in (*clocks.tolist(), None)]
        for work in works
    ]
    return Pool(
        name=name,
        clocks_mhz=clocks,
        latency_s=np.array([[truth.latency_s for truth in row] for row in truths]),
        energy_j=np.array([[truth.energy_j for truth in row] for row in truths]),
        effective_mhz=np.array([[truth.clock_mhz for truth in row] for row in truths]),
    )


def study(pools: Sequence[Pool], slacks: Sequence[float], seed: int) -> dict[str, Any]:
    workloads: dict[str, Any] = {}
    for pool in pools:
        workloads[pool.name] = {"kernels": len(pool.latency_s)} | {
            f"{slack:g}": compare([pool], slack, seed) for slack in slacks
        }
    means: dict[str, Any] = {}
    below: dict[str, float] = {}
    for slack in (f"{slack:g}" for slack in slacks):
        rows = [workload[slack] for workload in workloads.values()]
        means[slack] = {
            choice: mean([row[choice]["energy_ratio"] for row in rows]) for choice in CHOICES
        }
        below[slack] = round(means[slack]["joint"] / means[slack]["kernel_then_clock"], 4)
    return {
        "workloads": workloads,
        "geomean_energy_ratio": means,
        "joint_below_sequential": below,
        "network": {f"{slack:g}": compare(pools, slack, seed) for slack in slacks},
    }


def mean(values: Sequence[float]) -> float:
    return round(statistics.geometric_mean(values), 4)


# -- choices ---------------------------------------------------------------------------------------

#: Kernel and column (clock) of each workload.
Pairs = list[tuple[int, int]]


def compare(pools: Sequence[Pool], slack: float, seed: int) -> dict[str, Any]:
    """All choices for one workload, or for a network of several."""
    weights = [1 / pool.energy_j[pool.fastest, -1] for pool in pools]
    kernel = best(pools, weights, slack, [every(pool, columns=[-1]) for pool in pools])
    assert kernel is not None
    chosen = {
        "kernel": kernel,
        "clock": best_clock(pools, weights, slack, [[pool.fastest] for pool in pools]),
        "kernel_then_clock": best_clock(pools, weights, slack, [[row] for row, _ in kernel]),
        "joint": best_clock(pools, weights, slack, [range(len(p.latency_s)) for p in pools]),
        "found": found(pools, weights, slack, seed, ONE),
    }
    if len(pools) > 1:
        joint = best(pools, weights, slack, [every(pool) for pool in pools])
        assert joint is not None
        chosen["per_kernel"] = joint
        chosen["found_per_kernel"] = found(pools, weights, slack, seed, PER_KERNEL)
    reference = totals(pools, weights, [(pool.fastest, -1) for pool in pools])
    return {name: ratios(pools, weights, pairs, reference) for name, pairs in chosen.items()}


def every(
    pool: Pool, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None
) -> Pairs:
    rows = range(len(pool.latency_s)) if rows is None else rows
    columns = range(-1, len(pool.clocks_mhz)) if columns is None else columns
    return [(row, column) for row in rows for column in columns]


def best(
    pools: Sequence[Pool], weights: Sequence[float], slack: float, pairs: Sequence[Pairs]
) -> Pairs | None:
    """The pairs of least energy within the slack; None when none are."""
    picks = [tuple(np.array(each).T) for each in pairs]
    reference_s = totals(pools, weights, [(pool.fastest, -1) for pool in pools])[0]
    chosen, cost = best_options(
        [pool.latency_s[pick] for pool, pick in zip(pools, picks, strict=True)],
        [pool.energy_j[pick] for pool, pick in zip(pools, picks, strict=True)],
        weights,
        SlowdownBound(slack + 1e-12),
        reference_s,
    )
    if not np.isfinite(cost):
        return None
    return [each[index] for each, index in zip(pairs, chosen, strict=True)]


def best_clock(
    pools: Sequence[Pool], weights: Sequence[float], slack: float, rows: Sequence[Sequence[int]]
) -> Pairs:
    """The best pairs of these kernels with one clock for all."""
    results = [
        best(
            pools,
            weights,
            slack,
            [every(pool, each, [column]) for pool, each in zip(pools, rows, strict=True)],
        )
        for column in range(-1, len(pools[0].clocks_mhz))
    ]
    return min(
        (pairs for pairs in results if pairs is not None),
        key=lambda pairs: totals(pools, weights, pairs)[1],
    )


def totals(pools: Sequence[Pool], weights: Sequence[float], pairs: Pairs) -> tuple[float, float]:
    latency, energy = (
        sum(w * float(table[pair]) for w, table, pair in zip(weights, tables, pairs, strict=True))
        for tables in ([pool.latency_s for pool in pools], [pool.energy_j for pool in pools])
    )
    return latency, energy


def ratios(
    pools: Sequence[Pool],
    weights: Sequence[float],
    pairs: Pairs,
    reference: tuple[float, float],
) -> dict[str, Any]:
    latency_s, energy_j = totals(pools, weights, pairs)
    clocks = [
        None if column == -1 else float(pool.clocks_mhz[column])
        for pool, (_, column) in zip(pools, pairs, strict=True)
    ]
    return {
        "energy_ratio": round(float(energy_j / reference[1]), 4),
        "latency_ratio": round(float(latency_s / reference[0]), 4),
        "clock_mhz": clocks[0] if len(set(clocks)) == 1 else clocks,
    }


# -- what the tool finds ---------------------------------------------------------------------------


class Nothing:
    """A model that predicts nothing: the pool is measured, not predicted."""

    relative_error = None

    def fit(self, samples: Sequence[Sample]) -> None:
        pass

    def predict(self, *_: object, **__: object) -> Prediction | None:
        return None

    def save(self, path: object) -> None:
        pass

    def load(self, path: object) -> None:
        pass


def found(
    pools: Sequence[Pool], weights: Sequence[float], slack: float, seed: int, mode: str
) -> Pairs:
    """The pairs that a tuning run with ``--clocks`` would choose."""
    rng = np.random.default_rng(seed)
    by_name = {pool.name: pool for pool in pools}
    column = -1

    def measured(name: str, key: str, plan: MeasurementPlan) -> EnergyMeasurement:
        pool, row = by_name[name], int(key)
        windows = plan.min_windows
        noise = WINDOW_NOISE / np.sqrt(plan.window_s * windows)
        latency_s = pool.latency_s[row, column] * (1 + LATENCY_NOISE * rng.standard_normal())
        energy_j = pool.energy_j[row, column] * (1 + noise * rng.standard_normal())
        return EnergyMeasurement(
            energy_j=energy_j,
            stderr_j=noise * energy_j,
            latency_s=latency_s,
            launches=1,
            windows=windows,
            window_s=plan.window_s * windows,
            sensor_updates=1,
            method="counter",
            meter="played",
            scope="gpu",
            clock_mhz=float(pool.effective_mhz[row, column]),
            simulated=True,
        )

    @contextlib.contextmanager
    def locked(clock_mhz: float) -> Iterator[None]:
        nonlocal column
        column = int(np.flatnonzero(pools[0].clocks_mhz == clock_mhz)[0])
        try:
            yield
        finally:
            column = -1

    session = Session(
        objective=SlowdownBound(slack), policy=parse_policy("all"), model=Nothing(), clocks=mode
    )
    for pool, weight in zip(pools, weights, strict=True):
        session.add_task(pool.name, pool.name, weight)
        candidates = [
            Candidate(key=str(row), features=np.zeros(1), latency_s=float(value))
            for row, value in enumerate(pool.latency_s[:, -1])
        ]

        def measure(order: Order, name: str = pool.name) -> EnergyMeasurement:
            return measured(name, str(order.index), MeasurementPlan())

        session.run_round(pool.name, candidates, measure)
        keys = session.finalists(pool.name, FINALISTS)
        session.record_finals(
            pool.name, {key: measured(pool.name, key, FINALIST_PLAN) for key in keys}
        )
    ClockSearch(
        session,
        pools[0].clocks_mhz,
        CLOCKS,
        locked=locked,
        measure=lambda name, keys, long: {
            key: measured(name, key, FINALIST_PLAN if long else MeasurementPlan()) for key in keys
        },
    ).run()
    pairs = []
    for pool in pools:
        choice = session.choice(pool.name)
        assert choice is not None
        clock = choice.best.clock_mhz
        at = -1 if clock is None else int(np.flatnonzero(pool.clocks_mhz == clock)[0])
        pairs.append((int(choice.best.key), at))
    return pairs


def show(device: str, result: dict[str, Any]) -> None:
    """The ratios on stderr, for people."""
    for slack, means in result["geomean_energy_ratio"].items():
        network = result["network"][slack]
        for what, values in (
            ("geometric mean", means),
            ("network", {name: item["energy_ratio"] for name, item in network.items()}),
        ):
            texts = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            print(f"{device}, slack {slack}, {what}: {texts} [simulated]", file=sys.stderr)


if __name__ == "__main__":
    main()
