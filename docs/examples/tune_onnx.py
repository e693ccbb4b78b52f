"""Tune the costliest kernels of a network, compile it, and check it against ONNX Runtime or torch.

python docs/examples/tune_onnx.py model.onnx --trials 256 --work-dir out-onnx   # or model.pt2

Without RAPL counters this tunes for time on this CPU; with --device cuda and an NVIDIA GPU, for energy.
"""

import argparse
from pathlib import Path

from tvm_energy.meta_schedule import compiling
from tvm_energy.meta_schedule.device import open_device
from tvm_energy.meta_schedule.models import open_model
from tvm_energy.meta_schedule.networks import extract_tasks
from tvm_energy.meta_schedule.tuning import TuningTask, run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("model")
parser.add_argument("--trials", type=int, default=256)
parser.add_argument("--kernels", type=int, default=5, help="tune that many, the costliest")
parser.add_argument("--population", type=int, default=128, help="smaller is quicker and finds less")
parser.add_argument("--work-dir", default="out-onnx")
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()

model = open_model(arguments.model)
network = model.network

device = open_device(arguments.device)
objective = "energy:slack=0.05" if device.meter else "latency"
tasks = extract_tasks(network, device.target)
costliest = sorted(tasks, key=lambda task: task.flop * task.weight, reverse=True)
run(
    [TuningTask(name=t.name, mod=t.mod, weight=t.weight) for t in costliest[: arguments.kernels]],
    device=device,
    work_dir=Path(arguments.work_dir),
    trials=arguments.trials,
    trials_per_round=min(16, arguments.trials),
    objective=objective,
    population=arguments.population,
)
device.close()

compiled = compiling.compile_from_log(network, arguments.work_dir)
for kernel in compiled.kernels:
    print(f"{kernel.name}: {kernel.origin}{f' ({kernel.reason})' if kernel.reason else ''}")
library = Path(arguments.work_dir) / "model.so"
compiling.write_library(compiled, library)
loaded, reason = compiling.runnable(compiled, library)
if loaded is None:
    raise SystemExit(f"written to {library}, not run: {reason}")
inputs = network.random_inputs(seed=0)
verdict = compiling.compare_outputs(
    loaded.run(inputs), model.reference(inputs), model.reference_name
)
print(f"{library}: largest difference to {verdict.reference} {verdict.largest_error:.2g}")
if not verdict.ok:
    raise SystemExit(f"the compiled network does not compute what {verdict.reference} does")
