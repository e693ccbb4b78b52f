"""Energy-aware against latency-only tuning, on simulated GPUs.

For each workload the same number of trials: once with stock MetaSchedule (its cost model, database and
task scheduler; least latency wins), once with tvm_energy and its default objective, each with the search and population
that it has by default. Both winners are
then evaluated by the simulator without noise. Both search in one thread, since with more TVM's search
depends on their timing, and no two runs are alike. Every number is simulated. The last line of stdout is
one JSON object: for each device ``geomean_energy_ratio``, ``geomean_latency_ratio`` (ours / stock),
``measured_share`` (energy measurements / candidates), ``geomean_time_ratio`` (wall time of the whole run, with
the seconds that our energy measurements would take on a device), ``equal_time`` (both ratios of the kernel that ours
would have chosen when as much of that time had passed as stock took, without finalists), ``own_share`` (time of our parts, the simulator
included / time of stock's search), ``workloads``.

With ``--ablation`` instead: a network of the workloads, each with a weight, tuned with latency instead of energy in
one or both of the places where energy enters the search: the cost model's score and the task
scheduler (for which MetaSchedule's own stands). Measuring, ranking and finalists stay as they are. For each
device and each of these runs, over seeds: ``energy_ratio`` and ``latency_ratio`` (geometric means) of the network to
that with energy in both places, and ``energy_ratios`` of the single seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arguments import positive

from tvm_energy.errors import TvmEnergyError
from tvm_energy.policy import DEFAULT_POLICY
from tvm_energy.progress import SilentProgress
from tvm_energy.records import FILE_NAME, CandidateRecord, FinalRecord, RoundRecord, read_records

# BERT-base (sequence 128 and 384), ResNet-50 (batch 1), LLaMA-7B (one token, 128 tokens).
WORKLOADS = {
    "bert-qkv": "matmul:m=128,n=768,k=768",
    "bert-ffn": "matmul:m=384,n=3072,k=768",
    "llama-proj": "matmul:m=128,n=4096,k=4096",
    "bert-mv": "matvec:m=3072,k=768",
    "llama-mv": "matvec:m=4096,k=4096",
    "llama-ffn-mv": "matvec:m=11008,k=4096",
    "resnet-56": "conv2d:n=1,ci=64,co=64,h=56,w=56,kernel=3,padding=1",
    "resnet-14": "conv2d:n=1,ci=256,co=256,h=14,w=14,kernel=3,padding=1",
    "resnet-1x1": "conv2d:n=1,ci=64,co=256,h=56,w=56,kernel=1,padding=0",
}
QUICK = ("bert-qkv", "bert-mv", "resnet-1x1")

#: How often the network of the ablation calls its kernels: about a BERT-base layer's share and a ResNet stage's.
NETWORK = {"bert-qkv": 48, "bert-mv": 12, "resnet-1x1": 3, "resnet-14": 6}
PLACES = ("score", "scheduler")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three workloads, few trials")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--devices", default="sim:a100,sim:rtx4090")
    parser.add_argument("--workloads", default=None, help="names, comma-separated")
    parser.add_argument("--trials", type=positive, default=None)
    parser.add_argument("--trials-per-round", type=positive, default=16)
    parser.add_argument(
        "--population",
        type=positive,
        default=None,
        help="of both searches; each its own default, 32 with --quick",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--ablation", action="store_true", help="where energy enters the search")
    parser.add_argument(
        "--seeds", type=positive, default=None, help="of the ablation; 3, 1 with --quick"
    )
    options = parser.parse_args()
    trials = options.trials or (32 if options.quick else 128)
    population = options.population or (32 if options.quick else None)
    names = (
        options.workloads.split(",")
        if options.workloads
        else (QUICK if options.quick else WORKLOADS)
    )
    result: dict[str, Any] = {
        "simulated": True,
        "trials": trials,
        "trials_per_round": options.trials_per_round,
        "population": population,
    }
    for device in options.devices.split(","):
        if options.ablation:
            settings = Settings(
                trials, options.trials_per_round, population, options.seed, options.policy
            )
            seeds = options.seeds or (1 if options.quick else 3)
            result[device] = ablation(device, settings, seeds, options.json)
            continue
        rows = []
        for name in names:
            settings = Settings(
                trials=trials,
                per_round=options.trials_per_round,
                population=population,
                seed=options.seed,
                policy=options.policy,
            )
            row = compare(device, name, settings)
            rows.append(row)
            if not options.json:
                print(
                    f"{device} {name:12s} energy {row['energy_ratio']:.3f} latency "
                    f"{row['latency_ratio']:.3f} measured {row['measured_share']:.2f} "
                    f"({row['ours_s']:.0f} + {row['measuring_s']:.0f} s, stock {row['stock_s']:.0f} s) [simulated]",
                    file=sys.stderr,
                    flush=True,
                )
        result[device] = summary(rows)
    print(json.dumps(result))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "geomean_energy_ratio": round(geomean([row["energy_ratio"] for row in rows]), 4),
        "geomean_latency_ratio": round(geomean([row["latency_ratio"] for row in rows]), 4),
        "measured_share": round(statistics.mean(row["measured_share"] for row in rows), 4),
        "geomean_time_ratio": round(
            geomean([(row["ours_s"] + row["measuring_s"]) / row["stock_s"] for row in rows]), 4
        ),
        "equal_time": {
            name: round(geomean([row["equal_time"][name] for row in rows]), 4)
            for name in ("energy_ratio", "latency_ratio")
        },
        "own_share": round(
            sum(row["own_s"] for row in rows) / sum(row["search_s"] for row in rows), 4
        ),
        "workloads": {
            row["name"]: {key: value for key, value in row.items() if key != "name"} for row in rows
        },
    }


# -- ablation ----------------------------------------------------------------------------------


def ablation(device: str, settings: Settings, seeds: int, quiet: bool) -> dict[str, Any]:
    """The network with latency in one or all places, against energy in all; simulated."""
    variants = {
        "all": (),
        **{f"without {place}": (place,) for place in PLACES},
        "none": PLACES,
    }
    found: dict[str, list[Network]] = {name: [] for name in variants}
    for seed in range(settings.seed, settings.seed + seeds):
        for name, by_latency in variants.items():
            started = time.perf_counter()
            outcome = tune_network(device, dataclasses.replace(settings, seed=seed), by_latency)
            found[name].append(outcome)
            if not quiet:
                print(
                    f"{device} seed {seed} {name}: energy {outcome.energy_j:.6g} J, latency "
                    f"{outcome.latency_s:.6g} s, measured {outcome.measured_share:.2f}, kernels "
                    f"{' '.join(f'{each_j:.5g}' for each_j in outcome.kernels_j)} J "
                    f"({time.perf_counter() - started:.0f} s) [simulated]",
                    file=sys.stderr,
                    flush=True,
                )
    full = found["all"]
    return {
        name: {
            "energy_ratio": round(geomean([a.energy_j / b.energy_j for a, b in pairs]), 4),
            "latency_ratio": round(geomean([a.latency_s / b.latency_s for a, b in pairs]), 4),
            "measured_share": round(statistics.mean(a.measured_share for a, _ in pairs), 4),
            "energy_ratios": [round(a.energy_j / b.energy_j, 4) for a, b in pairs],
            "kernel_ratios": [
                [round(x / y, 4) for x, y in zip(a.kernels_j, b.kernels_j, strict=True)]
                for a, b in pairs
            ],
        }
        for name, outcomes in found.items()
        for pairs in [list(zip(outcomes, full, strict=True))]
    }


@dataclasses.dataclass(frozen=True)
class Network:
    """True joules and seconds of the network's chosen kernels, weighted, and the joules of each."""

    energy_j: float
    latency_s: float
    measured_share: float
    kernels_j: tuple[float, ...]


def tune_network(spec: str, settings: Settings, by_latency: Sequence[str]) -> Network:
    """Tune the four kernels as one network."""
    from tvm.s_tir import meta_schedule as ms

    from tvm_energy.meta_schedule.device import open_device
    from tvm_energy.meta_schedule.tuning import TuningTask, run
    from tvm_energy.meta_schedule.workloads import parse_workload
    from tvm_energy.session import Session

    functions = {name: parse_workload(WORKLOADS[name]).primfunc() for name in NETWORK}
    stock: dict[str, Any] = {"num_tuning_cores": 1}
    if "scheduler" in by_latency:
        stock["task_scheduler"] = ms.task_scheduler.GradientBased(seed=settings.seed)
    with contextlib.ExitStack() as stack:
        if "score" in by_latency:
            stack.enter_context(latency_in(Session, "scores"))
        device = stack.enter_context(contextlib.closing(open_device(spec)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = run(
            [TuningTask(name=n, mod=f, weight=NETWORK[n]) for n, f in functions.items()],
            device=device,
            work_dir=Path(folder),
            trials=settings.trials * len(NETWORK),
            trials_per_round=settings.per_round,
            seed=settings.seed,
            population=settings.population,
            policy=settings.policy,
            stock=stock,
        )
        truths = {name: evaluate(device, database, f) for name, f in functions.items()}
        tried = [
            r for r in read_records(Path(folder) / FILE_NAME) if isinstance(r, CandidateRecord)
        ]
    return Network(
        energy_j=sum(NETWORK[name] * energy_j for name, (energy_j, _) in truths.items()),
        latency_s=sum(NETWORK[name] * latency_s for name, (_, latency_s) in truths.items()),
        measured_share=sum(record.measured is not None for record in tried) / len(tried),
        kernels_j=tuple(energy_j for energy_j, _ in truths.values()),
    )


@contextlib.contextmanager
def latency_in(session_type: type, name: str) -> Iterator[None]:
    """While it is entered, one method of sessions ranks by latency, whatever their objective."""
    from tvm_energy.objective import Latency

    original = getattr(session_type, name)

    def by_latency(session: Any, *arguments: Any) -> Any:
        objective, session.objective = session.objective, Latency()
        try:
            return original(session, *arguments)
        finally:
            session.objective = objective

    setattr(session_type, name, by_latency)
    try:
        yield
    finally:
        setattr(session_type, name, original)


def geomean(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(value) for value in values))


@dataclasses.dataclass(frozen=True)
class Settings:
    trials: int
    per_round: int
    population: int | None
    seed: int
    policy: str


def compare(device: str, name: str, settings: Settings) -> dict[str, Any]:
    """Tune one workload both ways and evaluate both winners."""
    from tvm_energy.meta_schedule.compat import import_tensor_intrinsics
    from tvm_energy.meta_schedule.workloads import parse_workload

    function = parse_workload(WORKLOADS[name]).primfunc()
    import_tensor_intrinsics()  # in nobody's time
    stock = tune_stock(device, function, settings)
    ours = tune_ours(device, function, settings, stock.seconds)
    return {
        "name": name,
        "workload": WORKLOADS[name],
        "energy_ratio": round(ours.energy_j / stock.energy_j, 4),
        "latency_ratio": round(ours.latency_s / stock.latency_s, 4),
        "measured_share": round(ours.measured_share, 4),
        "equal_time": {
            "trials": ours.in_time[2],
            "energy_ratio": round(ours.in_time[0] / stock.energy_j, 4),
            "latency_ratio": round(ours.in_time[1] / stock.latency_s, 4),
        },
        "stock_energy_j": stock.energy_j,
        "stock_latency_s": stock.latency_s,
        "ours_s": round(ours.seconds, 1),
        "measuring_s": round(ours.measuring_s, 1),
        "stock_s": round(stock.seconds, 1),
        "own_s": round(ours.own_s, 2),
        "search_s": round(stock.search_s, 2),
        "build_s": round(ours.build_s, 2),
    }


@dataclasses.dataclass
class Outcome:
    energy_j: float
    latency_s: float
    seconds: float
    measured_share: float = 0.0
    measuring_s: float = 0.0
    in_time: tuple[float, float, int] = (0.0, 0.0, 0)
    own_s: float = 0.0
    search_s: float = 1e-9
    build_s: float = 0.0


def evaluate(device: Any, database: Any, function: Any) -> tuple[float, float]:
    """Noise-free simulated energy and latency of the kernel that a database deploys."""
    from tvm_energy.meta_schedule.kernel_description import describe_kernel
    from tvm_energy.meta_schedule.tuning import normalized

    schedule = database.query_schedule(normalized(function), device.target, "main")
    if schedule is None:
        sys.exit("no kernel was found")
    truth = device.gpu.truth(describe_kernel(schedule.mod, device.target))
    return truth.energy_j, truth.latency_s


class Stopwatch:
    """Counts the seconds that are spent in a method while it is entered."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)

    def __enter__(self) -> Stopwatch:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return self._original(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(self._owner, self._name, timed)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(self._owner, self._name, self._original)


def time_description(device: Any, database: Any) -> float:
    """Mean seconds in which one kernel is described for the simulator, over up to eight kernels."""
    from tvm_energy.meta_schedule.kernel_description import describe_kernel

    records = list(database.get_all_tuning_records())[:8]
    modules = [record.as_measure_candidate().sch.mod for record in records]
    started = time.perf_counter()
    for module in modules:
        try:
            describe_kernel(module, device.target)
        except TvmEnergyError:
            continue
    return (time.perf_counter() - started) / max(1, len(modules))


class RoundClock(SilentProgress):
    """When each round ended: seconds since the start, those of measuring on a device included."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.ended_s: list[float] = []
        self._measuring_s = 0.0

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        self._measuring_s += record.seconds["measure_device"]
        self.ended_s.append(time.perf_counter() - self.started_s + self._measuring_s)


def best_within(
    device: Any, database: Any, records: Sequence[Any], rounds: int
) -> tuple[float, float, int]:
    """True joules and seconds of what would be chosen after some rounds of one task, and the trials in them."""
    from tvm_energy.meta_schedule.kernel_description import describe_kernel
    from tvm_energy.objective import DEFAULT_OBJECTIVE, parse_objective
    from tvm_energy.ranking import choose, kernels_by_workload

    early = [r for r in records if isinstance(r, CandidateRecord) and r.round < rounds]
    ((workload, kernels),) = kernels_by_workload(early).items()
    choice = choose(kernels.values(), parse_objective(DEFAULT_OBJECTIVE))
    if choice is None:
        sys.exit("nothing was measured in the time that stock took")
    candidate = database.core.record(workload, choice.best.key).as_measure_candidate()
    truth = device.gpu.truth(describe_kernel(candidate.sch.mod, device.target))
    return truth.energy_j, truth.latency_s, len(early)


def tune_ours(spec: str, function: Any, settings: Settings, limit_s: float) -> Outcome:
    from tvm.s_tir import meta_schedule as ms

    from tvm_energy.meta_schedule.device import open_device
    from tvm_energy.meta_schedule.tuning import TuningTask, run
    from tvm_energy.session import Session

    device = open_device(spec)
    with tempfile.TemporaryDirectory() as folder:
        clock = RoundClock()
        with ms.Profiler() as profiler, Stopwatch(Session, "scores") as scoring:
            database = run(
                [TuningTask(name="main", mod=function)],
                device=device,
                work_dir=Path(folder),
                trials=settings.trials,
                trials_per_round=settings.per_round,
                seed=settings.seed,
                population=settings.population,
                policy=settings.policy,
                progress=clock,
                stock={"num_tuning_cores": 1},
            )
        seconds = time.perf_counter() - clock.started_s
        records = list(read_records(Path(folder) / FILE_NAME))
        energy_j, latency_s = evaluate(device, database, function)
        # Always the first round, which no tuner can do without.
        rounds = max(1, sum(ended_s <= limit_s for ended_s in clock.ended_s))
        in_time = best_within(device, database, records, rounds)
        description_s = time_description(device, database)
    device.close()
    tried = [record for record in records if isinstance(record, CandidateRecord)]
    spent = {str(key): float(value) for key, value in profiler.get().items()}
    # Ours: predicting, the round in the callback (features, simulated measuring, learning, records), the
    # simulated run, and the description of kernels for the simulator, which is made while building.
    own_s = (
        scoring.seconds
        + spent.get("MeasureCallback/PyMeasureCallback", 0.0)
        + spent["SendToRunner"]
        + description_s * len(tried)
    )
    return Outcome(
        energy_j=energy_j,
        latency_s=latency_s,
        seconds=seconds,
        measured_share=sum(record.measured is not None for record in tried) / len(tried),
        measuring_s=sum(
            record.measured.device_s
            for record in records
            if isinstance(record, (CandidateRecord, FinalRecord)) and record.measured is not None
        ),
        in_time=in_time,
        own_s=own_s,
        build_s=spent["SendToBuilder"],
    )


def tune_stock(spec: str, function: Any, settings: Settings) -> Outcome:
    from tvm.s_tir import meta_schedule as ms

    from tvm_energy.meta_schedule.device import open_device
    from tvm_energy.meta_schedule.tuning import evolutionary_search

    strategy = "evolutionary"
    if settings.population is not None:
        strategy = evolutionary_search(settings.population)
    device = open_device(spec)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with ms.Profiler() as profiler:
            database = ms.tune_tir(
                function,
                device.target,
                folder,
                settings.trials,
                num_trials_per_iter=settings.per_round,
                builder=device.builder,
                runner=device.runner,
                strategy=strategy,
                seed=settings.seed,
                num_tuning_cores=1,
            )
        seconds = time.perf_counter() - started
        energy_j, latency_s = evaluate(device, database, function)
    device.close()
    spent = {str(key): float(value) for key, value in profiler.get().items()}
    search_s = sum(value for key, value in spent.items() if key.startswith("EvoSearch"))
    return Outcome(energy_j=energy_j, latency_s=latency_s, seconds=seconds, search_s=search_s)


if __name__ == "__main__":
    main()
