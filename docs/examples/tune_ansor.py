"""Tune one operator with legacy Ansor for energy, and deploy it with stock Ansor.

Needs a TVM that has `tvm.auto_scheduler` (docs/ansor.md):
python docs/examples/tune_ansor.py --trials 64 --work-dir out-ansor
"""

import argparse
from pathlib import Path

from tvm import auto_scheduler, te

import tvm_energy
from tvm_energy import ansor

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--trials", type=int, default=64)
parser.add_argument("--population", type=int, default=512, help="smaller is quicker and finds less")
parser.add_argument("--work-dir", default="out-ansor")
parser.add_argument("--device", default="sim:a100", help="auto takes an NVIDIA GPU for CUDA tasks")
arguments = parser.parse_args()


@auto_scheduler.register_workload
def relu_of_product(m: int, n: int, k: int) -> list:
    """C = relu(A B)."""
    a = te.placeholder((m, k), name="a")
    b = te.placeholder((k, n), name="b")
    over = te.reduce_axis((0, k), name="over")
    product = te.compute((m, n), lambda i, j: te.sum(a[i, over] * b[over, j], axis=over))
    return [a, b, te.compute((m, n), lambda i, j: te.max(product[i, j], 0.0), name="result")]


# A simulated GPU is not there to be asked for its limits; `search_task` knows them. On a GPU of this
# machine auto_scheduler.SearchTask(func=..., args=..., target="cuda") does as well.
task = ansor.search_task(relu_of_product, (128, 128, 256), device=arguments.device)

ansor.tune(
    task,
    auto_scheduler.TuningOptions(
        num_measure_trials=arguments.trials, num_measures_per_round=min(16, arguments.trials)
    ),
    work_dir=arguments.work_dir,
    objective="energy:slack=0.05",  # least energy, at most 5 % slower than the fastest
    device=arguments.device,
    search_policy_params={"evolutionary_search_population": arguments.population},
)

(outcome,) = tvm_energy.summarize(arguments.work_dir).tasks
if outcome.best is None:
    raise SystemExit(f"no kernel: {outcome.reason}")
print(f"fastest: {outcome.fastest.latency_s:.3g} s, {outcome.fastest.energy_j:.3g} J a launch")
print(f"chosen:  {outcome.best.latency_s:.3g} s, {outcome.best.energy_j:.3g} J a launch")

# A log in which stock Ansor, without this package, picks the chosen schedule.
log = Path(arguments.work_dir) / "chosen.json"
ansor.export_log(arguments.work_dir, log)
schedule, tensors = task.apply_best(str(log))
print(f"{log}: {len(schedule.stages)} stages")
