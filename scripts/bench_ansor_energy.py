"""Energy-aware against stock Ansor on a simulated GPU, with equally many trials.

Run with the Python of scripts/ansor-environment. Each workload is tuned twice: by stock Ansor (its XGBModel,
its SketchPolicy; least latency wins) and by tvm_energy with its default objective, both with the same
search settings. The winners are evaluated by the simulator without noise; every number is simulated. The
last line of stdout is one JSON object: ``geomean_energy_ratio``, ``geomean_latency_ratio`` (ours / stock),
``workloads`` (a list of one row a seed each).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import positive

WORKLOADS = {
    "matmul": "matmul:m=128,n=768,k=768",
    "matvec": "matvec:m=3072,k=768",
    "conv2d": "conv2d:n=1,ci=64,co=64,h=56,w=56,kernel=3,padding=1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 trials instead of 64")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--device", default="sim:a100")
    parser.add_argument("--trials", type=positive, default=None)
    parser.add_argument("--trials-per-round", type=positive, default=None)
    parser.add_argument("--population", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=positive, default=1, help="so many seeds, from --seed on")
    options = parser.parse_args()
    options.trials = options.trials or (16 if options.quick else 64)
    options.trials_per_round = options.trials_per_round or (8 if options.quick else 16)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKLOADS}
    for seed in range(options.seed, options.seed + options.seeds):
        for name, spec in WORKLOADS.items():
            row = compare(spec, seed, options)
            rows[name].append(row)
            if not options.json:
                print(f"{name}, seed {seed}: {row} [simulated]", file=sys.stderr, flush=True)
    every = [row for of_one in rows.values() for row in of_one]
    print(
        json.dumps(
            {
                "simulated": True,
                "device": options.device,
                "trials": options.trials,
                "trials_per_round": options.trials_per_round,
                "population": options.population,
                "seed": options.seed,
                "seeds": options.seeds,
                "geomean_energy_ratio": geomean([row["energy_ratio"] for row in every]),
                "geomean_latency_ratio": geomean([row["latency_ratio"] for row in every]),
                "workloads": rows,
            }
        )
    )


def geomean(values: list[float]) -> float:
    return round(math.exp(statistics.mean(math.log(value) for value in values)), 4)


def compare(spec: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    from tvm import auto_scheduler

    from tvm_energy import ansor

    params = {
        "evolutionary_search_population": options.population,
        "sample_init_min_population": max(1, options.population // 4),
    }
    task = ansor.workload_task(spec, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        device = ansor.open_device(options.device)
        summary = ansor.tune(
            task,
            auto_scheduler.TuningOptions(
                num_measure_trials=options.trials, num_measures_per_round=options.trials_per_round
            ),
            work_dir=folder,
            device=device,
            search_policy_params=dict(params),
            seed=seed,
        )
        ours = truth(device, task, ansor.apply_best(task, folder))
        device.close()
        (row,) = summary.tasks
        log = str(Path(folder) / "stock.json")
        device = ansor.open_device(options.device)
        stock_options = auto_scheduler.TuningOptions(
            num_measure_trials=options.trials,
            num_measures_per_round=options.trials_per_round,
            verbose=0,
            builder=auto_scheduler.LocalBuilder(n_parallel=options.trials_per_round),
            measure_callbacks=[auto_scheduler.RecordToFile(log)],
        )
        # XGBModel would search by random scores until it has seen this many.
        model = auto_scheduler.XGBModel(num_warmup_sample=options.trials_per_round - 1)
        policy = auto_scheduler.SketchPolicy(task, model, params=dict(params), seed=seed, verbose=0)
        with ansor.measuring_on(device):
            task.tune(stock_options, search_policy=policy)
        stock = truth(device, task, task.apply_best(log))
        device.close()
    return {
        "workload": spec,
        "energy_ratio": round(ours[0] / stock[0], 4),
        "latency_ratio": round(ours[1] / stock[1], 4),
        "measured_share": round(row.energy_measurements / row.candidates, 4),
        "stock_energy_j": stock[0],
        "stock_latency_s": stock[1],
    }


def truth(device: Any, task: Any, scheduled: Any) -> tuple[float, float]:
    """Simulated joules and seconds of a launch, without noise."""
    from tvm_energy.ansor.kernel_description import describe_kernel

    schedule, tensors = scheduled
    result = device.gpu.truth(describe_kernel(schedule, tensors, task.target))
    return result.energy_j, result.latency_s


if __name__ == "__main__":
    main()
