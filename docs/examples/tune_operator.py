"""Tune one operator of your own for energy, and look at what was chosen.

python docs/examples/tune_operator.py --trials 64 --work-dir out-operator
"""

import argparse

import tvm
from tvm import te

import tvm_energy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--trials", type=int, default=64)
parser.add_argument("--population", type=int, default=128, help="smaller is quicker and finds less")
parser.add_argument("--work-dir", default="out-operator")
parser.add_argument(
    "--device", default="sim:a100", help="auto takes an NVIDIA GPU where there is one"
)
arguments = parser.parse_args()

# Any TensorIR function will do; here, C = relu(A B).
a = te.placeholder((128, 256), name="a")
b = te.placeholder((256, 128), name="b")
k = te.reduce_axis((0, 256), name="k")
product = te.compute((128, 128), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
result = te.compute((128, 128), lambda i, j: te.max(product[i, j], 0.0), name="result")
function = te.create_prim_func([a, b, result])

tvm_energy.tune_tir(
    function,
    tvm.target.Target("nvidia/nvidia-a100"),
    arguments.work_dir,
    arguments.trials,
    num_trials_per_iter=min(16, arguments.trials),
    objective="energy:slack=0.05",  # least energy, at most 5 % slower than the fastest
    device=arguments.device,
    population=arguments.population,
)

(task,) = tvm_energy.summarize(arguments.work_dir).tasks
if task.best is None:
    raise SystemExit(f"no kernel: {task.reason}")
print(f"fastest: {task.fastest.latency_s:.3g} s, {task.fastest.energy_j:.3g} J a launch")
print(f"chosen:  {task.best.latency_s:.3g} s, {task.best.energy_j:.3g} J a launch")
