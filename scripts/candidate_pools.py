"""Pools of real MetaSchedule candidates with simulated latency and energy, for the benchmarks.

Candidates come from TVM's CUDA design space: the first rounds at random, the others by a search for low
latency on the first device. Latency and energy are those of the simulated devices, without noise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.features import pool
from tvm_energy.simulation.devices import find_device
from tvm_energy.simulation.kernel import KernelWork


@dataclass(frozen=True)
class Kernels:
    """All candidates of one task, in the order in which they were tried.

    Attributes:
        rows: per-store features, one array (n_stores, 164) a kernel.
        round: shape (n,).
        latency_s, energy_j: noise-free, by device, shape (n,).
        works: what each kernel does, for the simulator; empty when read from a file.
    """

    rows: list[np.ndarray]
    round: np.ndarray
    latency_s: dict[str, np.ndarray]
    energy_j: dict[str, np.ndarray]
    works: list[KernelWork] = field(default_factory=list)


def generate(
    name: str, devices: list[str], rounds: int, batch: int, seed: int, random_rounds: int = 1
) -> Kernels:
    """Search one workload for low latency on the first device; evaluate on all."""
    from tvm_energy.meta_schedule.compat import import_tensor_intrinsics

    import_tensor_intrinsics()
    from tvm.s_tir import meta_schedule as ms
    from tvm.target import Target

    from tvm_energy.meta_schedule.tuning import normalized
    from tvm_energy.meta_schedule.workloads import parse_workload

    target = Target(find_device(devices[0]).target)
    module = normalized(parse_workload(name).primfunc())
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(module)
    context = ms.TuneContext(
        mod=module,
        target=target,
        space_generator="post-order-apply",
        search_strategy=ms.search_strategy.EvolutionarySearch(
            population_size=2 * batch,
            # Few random schedules of a matvec fit into shared memory: take few, and try long.
            init_min_unmeasured=8,
            max_fail_count=50,
        ),
        task_name=name,
        rand_state=seed,
        num_threads=1,
    )
    extractor = ms.feature_extractor.PerStoreFeature(extract_workload=False)
    model = XgbKernelModel(seed=seed, threads=1)
    samples: list[Sample] = []
    context.pre_tuning(
        max_trials=rounds * batch,
        num_trials_per_iter=batch,
        database=database,
        cost_model=_latency_cost_model(model, extractor),
    )
    rows, index, costs, works = [], [], [], []
    for number in range(rounds):
        candidates = context.generate_measure_candidates()
        if candidates is None:
            break
        features = [row.numpy() for row in extractor.extract_from(context, candidates)]
        results = []
        for candidate, row in zip(candidates, features, strict=True):
            evaluated = _evaluate(candidate.sch.mod, target, devices)
            results.append(_runner_result(evaluated[1][0][0] if evaluated else None))
            if evaluated is None:
                continue
            work, cost = evaluated
            works.append(work)
            rows.append(row)
            index.append(number)
            costs.append(cost)
            samples.append(Sample(group="", features=pool([row])[0], latency_s=cost[0][0]))
            database.commit_tuning_record(
                ms.database.TuningRecord(
                    candidate.sch.trace, workload, [cost[0][0]], target, candidate.args_info
                )
            )
        if number + 1 >= random_rounds:
            model.fit(samples)
        context.notify_runner_results(candidates, results)
    context.post_tuning()
    if not costs:
        sys.exit(f"{name}: no candidate was found")
    table = np.array(costs)  # (n, devices, 2)
    return Kernels(
        rows=rows,
        round=np.array(index),
        latency_s={device: table[:, at, 0] for at, device in enumerate(devices)},
        energy_j={device: table[:, at, 1] for at, device in enumerate(devices)},
        works=works,
    )


def _evaluate(
    module: Any, target: Any, devices: list[str]
) -> tuple[KernelWork, list[tuple[float, float]]] | None:
    """The kernel, its latency and energy on each device; None where it is refused by one."""
    from tvm_energy.errors import TvmEnergyError
    from tvm_energy.meta_schedule.kernel_description import describe_kernel
    from tvm_energy.simulation.gpu import simulate

    try:
        work = describe_kernel(module, target)
        truths = [simulate(find_device(device), work) for device in devices]
    except TvmEnergyError:
        return None
    return work, [(truth.latency_s, truth.energy_j) for truth in truths]


def _runner_result(latency_s: float | None) -> Any:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    if latency_s is None:
        return RunnerResult(None, "refused")
    return RunnerResult([latency_s], None)


def _latency_cost_model(model: XgbKernelModel, extractor: Any) -> Any:
    """Scores by predicted latency; at random while nothing is known."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.cost_model import PyCostModel

    rng = np.random.default_rng(0)

    @derived_object
    class LatencyCostModel(PyCostModel):
        def load(self, path: str) -> None:
            pass

        def save(self, path: str) -> None:
            pass

        def update(self, context: Any, candidates: Any, results: Any) -> None:
            pass

        def predict(self, context: Any, candidates: Any) -> np.ndarray:
            rows = [row.numpy() for row in extractor.extract_from(context, candidates)]
            prediction = model.predict(pool(rows), "") if rows else None
            if prediction is None:
                return rng.random(len(candidates))
            return np.asarray(1e-6 / prediction.latency_s, dtype="float64")

    return LatencyCostModel()


def save(path: Path, tasks: dict[str, Kernels]) -> None:
    arrays: dict[str, np.ndarray] = {"names": np.array(list(tasks))}
    for number, task in enumerate(tasks.values()):
        arrays[f"{number}.rows"] = np.concatenate(task.rows)
        arrays[f"{number}.stores"] = np.array([len(row) for row in task.rows])
        arrays[f"{number}.round"] = task.round
        for device in task.latency_s:
            arrays[f"{number}.{device}.latency_s"] = task.latency_s[device]
            arrays[f"{number}.{device}.energy_j"] = task.energy_j[device]
    np.savez_compressed(path, **arrays)


def load(path: Path, devices: list[str]) -> dict[str, Kernels]:
    tasks = {}
    with np.load(path, allow_pickle=False) as file:
        for number, name in enumerate(file["names"]):
            ends = np.cumsum(file[f"{number}.stores"])
            tasks[str(name)] = Kernels(
                rows=np.split(file[f"{number}.rows"], ends[:-1]),
                round=file[f"{number}.round"],
                latency_s={d: file[f"{number}.{d}.latency_s"] for d in devices},
                energy_j={d: file[f"{number}.{d}.energy_j"] for d in devices},
            )
    return tasks
