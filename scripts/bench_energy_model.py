"""How well the energy model predicts, on simulated GPUs.

Candidates come from TVM's real CUDA design space, searched for low latency round by round as in a tuning
run; their latency and energy come from the simulated device, with measuring noise on what the model
learns from and none on what it is judged by. Round r is predicted by a model that learned from all
tasks' earlier rounds; as in a run, it knows the latency of all of them and the energy of those near the
fastest. Every number is simulated. The last line of stdout is one JSON object:

for each device and variant (``factored``, ``direct``), means over tasks and rounds of

``rank_all``, ``rank_gated``   rank correlation of energy with latency known: all kernels, and those
                               that a latency gate of 50 % lets pass
``rank_search``                the same with latency unknown, as in the search: all kernels
``error_gated``, ``error_best``  median relative error: gated kernels, tenth with the least energy
``coverage_80``, ``_90``, ``_95``  share of gated kernels inside the interval of that level
``width_80``, ``_90``, ``_95``   mean width of the interval over the prediction

With ``--ablation`` more variants (``scripts/model_variants.py``), and each task on its own, ``alone`` against
``warm``: begun with what was learned of the other tasks; and on a random half of its candidates ``half alone``
against ``half known``: begun with what an earlier run learned of the other half.

Also ``fit_5000_s``, ``predict_512_s`` (features given), ``pool_512_s`` (features from TVM's rows): seconds
on this machine, with `--threads` threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from arguments import positive
from candidate_pools import Kernels, generate, load, save
from model_variants import MODELS, reread

from tvm_energy.energy_model.base import Prediction, Sample
from tvm_energy.energy_model.xgb import Variant, XgbKernelModel
from tvm_energy.features import pool

WORKLOADS = (
    "matmul:m=128,n=768,k=768",
    "matvec:m=3072,k=768",
    "conv2d:n=1,ci=64,co=256,h=56,w=56,kernel=1,padding=0",
    "conv2d:n=1,ci=256,co=256,h=14,w=14,kernel=3,padding=1",
    "matmul:m=384,n=3072,k=768",
    "matvec:m=4096,k=4096",
)
QUICK = 3
VARIANTS: tuple[Variant, ...] = ("factored", "direct")

#: Kernels this much slower than the fastest so far get an energy measurement.
GATE = 0.5
#: Nominal coverages of the intervals.
LEVELS = (0.8, 0.9, 0.95)
#: Relative standard deviation of what is measured.
LATENCY_NOISE = 0.005
ENERGY_NOISE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three tasks")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--devices", default="a100,rtx4090")
    parser.add_argument(
        "--ablation", action="store_true", help="more variants, and warm starts; no timing"
    )
    parser.add_argument("--rounds", type=positive, default=None)
    parser.add_argument("--batch", type=positive, default=None, help="candidates in each round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument(
        "--pool",
        type=Path,
        default=Path(__file__).parent / "data" / "candidate_pools.npz",
        help="candidates; a file that does not exist is made, with TVM",
    )
    options = parser.parse_args()
    rounds = options.rounds or (4 if options.quick else 6)
    batch = options.batch or (24 if options.quick else 32)
    devices = options.devices.split(",")
    tasks = load(options.pool, devices) if options.pool.exists() else {}
    if not tasks:
        for name in WORKLOADS[:QUICK] if options.quick else WORKLOADS:
            tasks[name] = generate(name, devices, rounds, batch, options.seed)
            save(options.pool, tasks)
    tasks = dict(list(tasks.items())[: QUICK if options.quick else None])
    for name, task in tasks.items():
        say(options, f"{name}: {len(task.rows)} candidates [simulated]")
    result: dict[str, Any] = {
        "simulated": True,
        "tasks": len(tasks),
        "candidates": sum(len(task.rows) for task in tasks.values()),
    }
    for device in devices:
        result[device] = {}
        models: dict[str, XgbKernelModel] = {
            variant: XgbKernelModel(variant, seed=options.seed, threads=options.threads)
            for variant in VARIANTS
        }
        if options.ablation:
            models = {variant: make(options.seed) for variant, make in MODELS.items()}
        for variant, model in models.items():
            result[device][variant] = judge(model, tasks, device, options.seed)
            say(options, f"{device} {variant}: {result[device][variant]} [simulated]")
        if options.ablation:
            result[device] |= warm_starts(tasks, device, options.seed)
            result[device] |= known_starts(tasks, device, options.seed)
            for name in ("alone", "warm", "half alone", "half known"):
                say(options, f"{device} {name}: {result[device][name]} [simulated]")
    if not options.ablation:
        result |= speed(tasks, devices[0], options.threads)
    print(json.dumps(result))


def say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print(text, file=sys.stderr, flush=True)


# -- judging -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One round of one task: what is predicted and the truth."""

    task: str
    features: np.ndarray
    latency_s: np.ndarray
    energy_j: np.ndarray
    gated: np.ndarray
    samples: list[Sample]


def rounds_of(name: str, task: Kernels, device: str, seed: int) -> Iterator[Round]:
    rng = np.random.default_rng(seed)
    features = pool(task.rows)
    latency_s, energy_j = task.latency_s[device], task.energy_j[device]
    for number in range(int(task.round.max()) + 1):
        now = task.round == number
        best_s = latency_s[task.round <= number].min()
        gated = latency_s[now] <= (1 + GATE) * best_s
        noisy_s = latency_s[now] * (1 + LATENCY_NOISE * rng.standard_normal(now.sum()))
        noisy_j = energy_j[now] * (1 + ENERGY_NOISE * rng.standard_normal(now.sum()))
        yield Round(
            task=name,
            features=features[now],
            latency_s=latency_s[now],
            energy_j=energy_j[now],
            gated=gated,
            samples=[
                Sample(group=name, features=f, latency_s=float(t), energy_j=float(e) if g else None)
                for f, t, e, g in zip(features[now], noisy_s, noisy_j, gated, strict=True)
            ],
        )


def judge(
    model: XgbKernelModel, tasks: dict[str, Kernels], device: str, seed: int
) -> dict[str, float]:
    """Mean quality over the rounds that could be predicted."""
    known: list[Sample] = []
    scores: dict[str, list[float]] = {}
    for batches in zip(
        *(rounds_of(name, task, device, seed) for name, task in tasks.items()), strict=False
    ):
        for batch in batches:
            measured_s = np.array([sample.latency_s for sample in batch.samples])
            with_latency = model.predict(batch.features, batch.task, latency_s=measured_s)
            without = model.predict(batch.features, batch.task)
            if with_latency is None or with_latency.energy_j is None or without is None:
                continue
            for key, value in quality(batch, with_latency, without).items():
                if np.isfinite(value):
                    scores.setdefault(key, []).append(value)
        known += [sample for batch in batches for sample in batch.samples]
        model.fit(known)
    return {key: round(statistics.mean(values), 4) for key, values in sorted(scores.items())}


def warm_starts(tasks: dict[str, Kernels], device: str, seed: int) -> dict[str, Any]:
    """Each task on its own, without and with what was learned of the others; means over tasks."""
    found: dict[str, list[dict[str, float]]] = {"alone": [], "warm": []}
    for name, task in tasks.items():
        others = XgbKernelModel(seed=seed)
        others.fit(
            [
                sample
                for other, kernels in tasks.items()
                if other != name
                for batch in rounds_of(other, kernels, device, seed)
                for sample in batch.samples
            ]
        )
        for start, games in found.items():
            model = XgbKernelModel(seed=seed)
            if start == "warm":
                model.adopt(reread(others))
            games.append(judge(model, {name: task}, device, seed))
    return {start: means(games) for start, games in found.items()}


def known_starts(tasks: dict[str, Kernels], device: str, seed: int) -> dict[str, Any]:
    """Half of each task's candidates, without and with what was learned of its other half; means over tasks."""
    found: dict[str, list[dict[str, float]]] = {"half alone": [], "half known": []}
    for name, task in tasks.items():
        first = np.random.default_rng(seed).random(len(task.round)) < 0.5
        earlier = XgbKernelModel(seed=seed)
        earlier.fit(
            [s for batch in rounds_of(name, part(task, first), device, seed) for s in batch.samples]
        )
        for start, games in found.items():
            model = XgbKernelModel(seed=seed)
            if start == "half known":
                model.adopt(reread(earlier))
            games.append(judge(model, {name: part(task, ~first)}, device, seed + 1))
    return {start: means(games) for start, games in found.items()}


def part(task: Kernels, chosen: np.ndarray) -> Kernels:
    """Some of a task's candidates; rounds keep their order."""
    return Kernels(
        rows=[row for row, at in zip(task.rows, chosen, strict=True) if at],
        round=np.unique(task.round[chosen], return_inverse=True)[1],
        latency_s={name: values[chosen] for name, values in task.latency_s.items()},
        energy_j={name: values[chosen] for name, values in task.energy_j.items()},
    )


def means(games: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure over the games that have it."""
    return {
        key: round(statistics.mean(game[key] for game in games if key in game), 4)
        for key in sorted({key for game in games for key in game})
    }


def quality(batch: Round, known: Prediction, unknown: Prediction) -> dict[str, float]:
    assert known.energy_j is not None
    assert known.energy_stderr_j is not None
    assert unknown.energy_j is not None
    error = np.abs(known.energy_j / batch.energy_j - 1)
    best = np.argsort(batch.energy_j)[: max(1, len(error) // 10)]
    gated = batch.gated
    coverage = {}
    for level in LEVELS:
        low_j, high_j = known.interval(level)
        inside = (low_j <= batch.energy_j) & (batch.energy_j <= high_j)
        coverage[f"coverage_{100 * level:.0f}"] = mean(inside[gated])
        coverage[f"width_{100 * level:.0f}"] = mean(((high_j - low_j) / known.energy_j)[gated])
    return {
        "rank_all": rank(known.energy_j, batch.energy_j),
        "rank_gated": rank(known.energy_j[gated], batch.energy_j[gated]),
        "rank_search": rank(unknown.energy_j, batch.energy_j),
        "error_gated": float(np.median(error[gated])) if gated.any() else np.nan,
        "error_best": float(np.median(error[best])),
    } | coverage


def mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def rank(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation; NaN for fewer than five or constant values."""
    from scipy.stats import spearmanr

    if len(one) < 5 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(spearmanr(one, other).statistic)


def speed(tasks: dict[str, Kernels], device: str, threads: int) -> dict[str, float]:
    """Seconds to fit 5,000 samples (all with energy) and to predict 512 without latency."""
    samples = [
        replace(sample, energy_j=float(energy_j))
        for name, task in tasks.items()
        for batch in rounds_of(name, task, device, 0)
        for sample, energy_j in zip(batch.samples, batch.energy_j, strict=True)
    ]
    rng = np.random.default_rng(0)
    # More kernels than were searched: each takes half of its features from another.
    many = [
        replace(one, features=np.where(rng.random(len(one.features)) < 0.5, one.features, other))
        for one, other in (
            (samples[one], samples[other].features)
            for one, other in rng.integers(len(samples), size=(5000, 2))
        )
    ]
    model = XgbKernelModel(threads=threads)
    model.fit(many)  # the first time it also cross-validates
    fits, predictions = [], []
    for _ in range(3):
        started = time.perf_counter()
        model.fit(many)
        fits.append(time.perf_counter() - started)
    features = np.stack([sample.features for sample in many[:512]])
    for _ in range(20):
        started = time.perf_counter()
        model.predict(features, many[0].group)
        predictions.append(time.perf_counter() - started)
    rows = [row for task in tasks.values() for row in task.rows]
    rows = [rows[index % len(rows)] for index in range(512)]
    started = time.perf_counter()
    pool(rows)
    return {
        "fit_5000_s": round(statistics.median(fits), 3),
        "predict_512_s": round(statistics.median(predictions), 4),
        "pool_512_s": round(time.perf_counter() - started, 4),
    }


if __name__ == "__main__":
    main()
