"""Tune the costliest kernels of an ONNX network, compile it, and check it against ONNX Runtime.

python docs/examples/tune_onnx.py model.onnx --trials 256 --work-dir out-onnx

Without RAPL counters this tunes for time on this CPU; with --device cuda and an NVIDIA GPU, for energy.
"""

import argparse
from pathlib import Path

from tvm_energy.meta_schedule import compiling, networks
from tvm_energy.meta_schedule.device import open_device
from tvm_energy.meta_schedule.tuning import TuningTask, run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("model")
parser.add_argument("--trials", type=int, default=256)
parser.add_argument("--kernels", type=int, default=5, help="tune that many, the costliest")
parser.add_argument("--population", type=int, default=128, help="smaller is quicker and finds less")
parser.add_argument("--work-dir", default="out-onnx")
parser.add_argument("--device", default="cpu")
arguments = parser.parse_args()

graph = networks.read_onnx(arguments.model)
network = networks.import_onnx(graph, name=Path(arguments.model).stem, source=arguments.model)

device = open_device(arguments.device)
objective = "energy:slack=0.05" if device.meter else "latency"
tasks = networks.extract_tasks(network, device.target)
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
    loaded.run(inputs), compiling.run_onnxruntime(graph, inputs), "ONNX Runtime"
)
print(f"{library}: largest difference to ONNX Runtime {verdict.largest_error:.2g}")
if not verdict.ok:
    raise SystemExit("the compiled network does not compute what ONNX Runtime does")
