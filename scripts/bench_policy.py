"""How much each policy measures, and what it misses by that.

Pools of candidates are played round by round through the session of a tuning run: gate, energy model,
policy, learning, finalists. Three kinds of pools:

* real MetaSchedule candidates with latency and energy of simulated GPUs (``scripts/data``);
* kernels whose energy was measured on a GPU, by ``gpu_table.py`` (``--table``, in place of the other pools);
* real measurements: GEMM shapes on an H200 (aiconfigurator), where a candidate is a shape, its cost joules
  and seconds a floating-point operation; batch size x power limit of training jobs (Zeus).

Measuring is played: a window of w seconds has a relative standard deviation of 1 % x sqrt(1 s / w), a
latency one of 0.3 %; its device time is warm-up and windows by the same `MeasurementPlan` as in a run.
Regret is the true energy of the winner over that of the best kernel within the slack, less 1.

The last line of stdout is one JSON object: for each device and policy ``measured_share`` (of all
candidates), ``measured_share_of_gated``, ``measuring_s`` (device seconds a pool, finalists not
included), ``finals_s`` (device seconds of the finalists, about the same for all), ``median_regret``,
``p90_regret``. With ``--ablation``, for each simulated device, model and policy: the models of
``scripts/model_variants.py``, and ``warm``, begun with what was learned of the device's other tasks.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arguments import positive
from candidate_pools import Kernels, load
from model_variants import MODELS, reread

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import RecordFormatError, TvmEnergyError
from tvm_energy.features import pool
from tvm_energy.measurement import (
    FINALIST_PLAN,
    EnergyMeasurement,
    MeasurementPlan,
    WindowScatter,
)
from tvm_energy.objective import SlowdownBound
from tvm_energy.policy import parse_policy
from tvm_energy.session import Candidate, Order, Session

DATA = Path(__file__).parent / "data"
DEVICES = ("a100", "rtx4090", "h200")
POLICIES = ("all", "snr", "fixed:0.25", "gain", "none")
SLACK = 0.05
FINALISTS = 4
LATENCY_NOISE = 0.003
#: Of a window of 1 s: 1 % of one of 0.3 s. On recorded traces of an A100 and an RTX 3090 it is 0.3 to 0.4 %.
WINDOW_NOISE = 0.0055
WARM_GATE = (
    1.25  # kernels measured in the runs that a warm start begins with: this near the fastest
)


@dataclass(frozen=True)
class Pool:
    """Candidates of one task in the order in which they are tried.

    Attributes:
        name: of the task.
        features: shape (n, n_features).
        latency_s, energy_j: true values, shape (n,).
        round: number of the round in which each is tried, shape (n,).
    """

    name: str
    features: np.ndarray
    latency_s: np.ndarray
    energy_j: np.ndarray
    round: np.ndarray


@dataclass(frozen=True)
class Played:
    """One pool played under one policy; `curve` holds (device seconds, regret) after each round."""

    measured_share: float
    measured_share_of_gated: float
    measuring_s: float
    finals_s: float
    regret: float
    curve: list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three tasks of each kind, one seed")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--policies", default=None, help="specs, separated by spaces")
    parser.add_argument(
        "--devices", default=None, help="some of them, comma-separated: sim:a100,h200"
    )
    parser.add_argument("--seeds", type=positive, default=None)
    parser.add_argument("--plot", type=Path, help="file for regret over measuring time")
    parser.add_argument(
        "--ablation", action="store_true", help="variants of the energy model instead"
    )
    parser.add_argument(
        "--table", type=Path, metavar="DIR", help="a table of gpu_table.py, in place of all pools"
    )
    options = parser.parse_args()
    if options.table and options.ablation:
        parser.error("--ablation plays simulated pools, not a --table")
    policies = options.policies.split() if options.policies else POLICIES
    seeds = range(options.seeds or (1 if options.quick else 3))
    result: dict[str, Any] = {"slack": SLACK, "seeds": len(seeds)}
    curves: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    most = 3 if options.quick else None
    try:
        sources = [table_pools(options.table, most)] if options.table else all_pools(most)
    except TvmEnergyError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(1)
    for device, simulated, pools in sources:
        if options.devices and device not in options.devices.split(","):
            continue
        if options.ablation:
            if simulated:
                result[device] = ablation(device, pools, options.policies, seeds, options.json)
            continue
        result[device] = {"tasks": len(pools), "simulated": simulated}
        for spec in policies:
            games = [play(each, spec, seed) for each in pools for seed in seeds]
            result[device][spec] = summary(games)
            curves.setdefault(device, {})[spec] = [game.curve for game in games]
            if not options.json:
                print(
                    f"{device} {spec}: {result[device][spec]} [{kind_of(simulated)}]",
                    file=sys.stderr,
                )
    if options.plot:
        draw(
            {f"{each} ({kind_of(result[each]['simulated'])})": curves[each] for each in curves},
            options.plot,
        )
    print(json.dumps(result))


def ablation(
    device: str, pools: Sequence[Pool], policies: str | None, seeds: range, quiet: bool
) -> dict[str, Any]:
    """Figures of each model under each policy; simulated."""
    found: dict[str, Any] = {"tasks": len(pools), "simulated": True}
    earlier = {
        (each.name, seed): learned_of([other for other in pools if other is not each], seed)
        for each in pools
        for seed in seeds
    }

    def model_of(name: str, each: Pool, seed: int) -> XgbKernelModel:
        if name != "warm":
            return MODELS[name](seed)
        model = XgbKernelModel(seed=seed)
        model.adopt(earlier[each.name, seed])
        return model

    for name in (*MODELS, "warm"):
        found[name] = {}
        for spec in policies.split() if policies else ("snr", "gain"):
            games = [
                play(each, spec, seed, model_of(name, each, seed))
                for each in pools
                for seed in seeds
            ]
            found[name][spec] = summary(games)
            if not quiet:
                print(f"{device} {name} {spec}: {found[name][spec]} [simulated]", file=sys.stderr)
    return found


def learned_of(pools: Sequence[Pool], seed: int) -> XgbKernelModel:
    """A model of finished runs of these pools, in each of which the fast kernels were measured."""
    samples = []
    for each in pools:
        device = Device(each, seed)
        limit_s = WARM_GATE * each.latency_s.min()
        samples += [
            Sample(
                group=each.name,
                features=each.features[index],
                latency_s=device.latency_s(index),
                energy_j=device.measure(index, MeasurementPlan()).energy_j
                if each.latency_s[index] <= limit_s
                else None,
            )
            for index in range(len(each.latency_s))
        ]
    model = XgbKernelModel(seed=seed)
    model.fit(samples)
    return reread(model)


def summary(games: Sequence[Played]) -> dict[str, float]:
    regrets = [game.regret for game in games]
    return {
        "measured_share": round(float(np.mean([g.measured_share for g in games])), 4),
        "measured_share_of_gated": round(
            float(np.mean([g.measured_share_of_gated for g in games])), 4
        ),
        "measuring_s": round(float(np.mean([g.measuring_s for g in games])), 1),
        "finals_s": round(float(np.mean([g.finals_s for g in games])), 1),
        "median_regret": round(float(np.median(regrets)), 5),
        "p90_regret": round(float(np.quantile(regrets, 0.9)), 5),
    }


# -- pools -------------------------------------------------------------------------------------


def all_pools(most: int | None) -> Iterator[tuple[str, bool, list[Pool]]]:
    """Device, whether it is simulated, and its pools; `most` of each kind."""
    kernels = load(DATA / "candidate_pools.npz", list(DEVICES))
    for device in DEVICES:
        yield f"sim:{device}", True, kernel_pools(kernels, device)[:most]
    yield "h200", False, gemm_pools()[:most]
    for gpu in ("a40", "v100"):
        yield gpu, False, training_pools(gpu)[:most]


def kernel_pools(kernels: Mapping[str, Kernels], device: str) -> list[Pool]:
    return [
        Pool(
            name=name,
            features=pool(task.rows),
            latency_s=task.latency_s[device],
            energy_j=task.energy_j[device],
            round=task.round,
        )
        for name, task in kernels.items()
    ]


def table_pools(path: Path, most: int | None) -> tuple[str, bool, list[Pool]]:
    """The same of a table that `gpu_table` wrote.

    Raises:
        RecordFormatError: there is none, or it is broken.
    """
    try:
        about = json.loads((path / "about.json").read_text(encoding="utf-8"))
        device, simulated = about["device"], about["simulated"]
        if not isinstance(device, str) or not isinstance(simulated, bool):
            raise TypeError("about.json must name the device and say whether it is simulated")
        pools = kernel_pools(load(path / "pools.npz", [device]), device)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as exc:
        raise RecordFormatError(f"{path} holds no table of gpu_table.py: {exc}") from exc
    return device, simulated, pools[:most]


def kind_of(simulated: bool) -> str:
    """What the numbers of a device are."""
    return "simulated" if simulated else "measured, replayed"


def table(name: str) -> list[dict[str, str]]:
    with lzma.open(DATA / name, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def gemm_pools() -> list[Pool]:
    """GEMM shapes of one size (m n k within a factor of 2) on an H200: joules and seconds an operation."""
    rows = table("h200_gemm.csv.xz")
    shape = np.array([[int(row[key]) for key in "mnk"] for row in rows], dtype=float)
    latency_s = np.array([float(row["latency_ms"]) for row in rows]) * 1e-3
    power_w = np.array([float(row["power_w"]) for row in rows])
    operations = 2 * shape.prod(axis=1)
    size = np.array([int(row["size"]) for row in rows])
    logs = np.log2(shape)
    features = np.column_stack(
        [logs, logs[:, 0] - logs[:, 1], logs[:, 2] - logs[:, 1], *(shape.T % 128 == 0)]
    )
    return [
        shuffled(f"gemm-2^{each}", features[at], (latency_s / operations)[at] * 1e12, power_w[at])
        for each in sorted(set(size))
        for at in [size == each]
    ]


def training_pools(gpu: str) -> list[Pool]:
    """Batch size x power limit of a training job; joules and seconds an epoch."""
    jobs: dict[str, list[dict[str, str]]] = {}
    for row in table(f"zeus_{gpu}.csv.xz"):
        jobs.setdefault(f"{row['dataset']} {row['network']}", []).append(row)
    return [
        shuffled(
            name,
            np.array([[np.log2(float(r["batch_size"])), float(r["power_limit"])] for r in rows]),
            np.array([float(r["time_per_epoch"]) for r in rows]),
            np.array([float(r["average_power"]) for r in rows]),
            batch=16,
        )
        for name, rows in jobs.items()
        if len(rows) >= 32
    ]


def shuffled(
    name: str, features: np.ndarray, latency_s: np.ndarray, power_w: np.ndarray, batch: int = 64
) -> Pool:
    """A pool tried in random order."""
    order = np.random.default_rng(0).permutation(len(latency_s))
    return Pool(
        name=name,
        features=features[order],
        latency_s=latency_s[order],
        energy_j=(power_w * latency_s)[order],
        round=np.arange(len(order)) // batch,
    )


# -- playing -----------------------------------------------------------------------------------


class Device:
    """Plays latency and energy of one pool's candidates, with noise."""

    def __init__(self, pool_: Pool, seed: int) -> None:
        self._pool = pool_
        self._rng = np.random.default_rng(seed)
        self.spent_s = 0.0

    def latency_s(self, index: int) -> float:
        return float(self._pool.latency_s[index] * (1 + LATENCY_NOISE * self._rng.normal()))

    def measure(self, index: int, plan: MeasurementPlan) -> EnergyMeasurement:
        """Windows that scatter, until the plan has enough of them; the standard error is the protocol's."""
        truth_j = float(self._pool.energy_j[index])
        sigma_j = truth_j * WINDOW_NOISE / np.sqrt(plan.window_s)
        windows: list[float] = []
        mean_j = stderr_j = 0.0
        scatter = None
        while not windows or not plan.enough(len(windows), mean_j, stderr_j):
            windows.append(truth_j + sigma_j * float(self._rng.normal()))
            mean_j = float(np.mean(windows))
            known = plan.scatter
            if len(windows) > 1:
                scatter = float(np.std(windows, ddof=1)) / mean_j
                freedom = len(windows) - 1
                known += WindowScatter(freedom * scatter**2, freedom)
            relative = max(scatter or 0.0, known.of_one_window())
            stderr_j = mean_j * relative / np.sqrt(len(windows))
        device_s = plan.warmup_s + len(windows) * plan.window_s
        self.spent_s += device_s
        return EnergyMeasurement(
            energy_j=mean_j,
            stderr_j=float(stderr_j),
            latency_s=self.latency_s(index),
            launches=1,
            windows=len(windows),
            window_s=len(windows) * plan.window_s,
            sensor_updates=1,
            method="counter",
            meter="played",
            scope="gpu",
            device_s=device_s,
            simulated=True,
            window_scatter=scatter,
        )


def play(pool_: Pool, spec: str, seed: int, model: XgbKernelModel | None = None) -> Played:
    """Tune one pool with one policy."""
    session = Session(
        objective=SlowdownBound(SLACK),
        policy=parse_policy(spec),
        model=model or XgbKernelModel(seed=seed),
        rng=np.random.default_rng(seed),
    )
    device = Device(pool_, seed)
    plan = MeasurementPlan()
    session.add_task("task", pool_.name)
    gated = measured = 0
    curve = []
    for number in range(int(pool_.round.max()) + 1):
        members = np.flatnonzero(pool_.round == number)
        batch = [
            Candidate(
                key=str(index), features=pool_.features[index], latency_s=device.latency_s(index)
            )
            for index in members
        ]

        def measure(order: Order, members: np.ndarray = members) -> EnergyMeasurement:
            return device.measure(int(members[order.index]), order.plan(plan))

        record = session.run_round("task", batch, measure)
        gated += record.gated
        measured += record.measured
        curve.append((device.spent_s, regret(pool_, session, pool_.round <= number)))
    spent_s = device.spent_s
    finals = {
        key: device.measure(int(key), FINALIST_PLAN) for key in session.finalists("task", FINALISTS)
    }
    session.record_finals("task", finals)
    return Played(
        measured_share=measured / len(pool_.latency_s),
        measured_share_of_gated=measured / gated,
        measuring_s=spent_s,
        finals_s=device.spent_s - spent_s,
        regret=regret(pool_, session, np.ones(len(pool_.round), dtype=bool)),
        curve=curve,
    )


def regret(pool_: Pool, session: Session, seen: np.ndarray) -> float:
    """Of the kernel that would be chosen now, against the best of those seen; NaN without a choice."""
    choice = session.choice("task")
    if choice is None:
        return float("nan")
    limit_s = (1 + SLACK) * pool_.latency_s[seen].min()
    best_j = pool_.energy_j[seen & (pool_.latency_s <= limit_s)].min()
    return max(0.0, float(pool_.energy_j[int(choice.best.key)] / best_j - 1))


def draw(curves: dict[str, dict[str, list[list[tuple[float, float]]]]], path: Path) -> None:
    """Median regret over device seconds, one panel a title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), squeeze=False)
    for axis, (device, by_policy) in zip(axes[0], curves.items(), strict=True):
        for spec, games in by_policy.items():
            rounds = min(len(game) for game in games)
            values = np.array([game[:rounds] for game in games])
            if np.isnan(values).all(axis=0).any():
                continue
            seconds, regrets = np.nanmedian(values, axis=0).T
            axis.plot(seconds, 100 * regrets, marker=".", label=spec)
        axis.set(title=device, xlabel="device seconds of measuring", xscale="log")
    axes[0][0].set_ylabel("median regret, %")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
