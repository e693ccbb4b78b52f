"""Tune a PyTorch model through torch.export, and run it with the tuned kernels.

python docs/examples/tune_torch.py --trials 64 --work-dir out-torch
"""

import argparse

import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

import tvm_energy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--trials", type=int, default=64)
parser.add_argument("--population", type=int, default=128, help="smaller is quicker and finds less")
parser.add_argument("--work-dir", default="out-torch")
arguments = parser.parse_args()

model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
).eval()
example = torch.randn(4, 64)
with torch.no_grad():
    module = from_exported_program(torch.export.export(model, (example,)))

# On a CPU without energy counters only time can be tuned for; see `tvm-energy doctor`.
target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
with target:
    module = relax.get_pipeline("zero")(module)
database = tvm_energy.tune_relax(
    module,
    {},
    target,
    arguments.work_dir,
    arguments.trials,
    num_trials_per_iter=min(16, arguments.trials),
    objective="latency",
    population=arguments.population,
)
with target, database, tvm.transform.PassContext(opt_level=3):
    module = relax.transform.MetaScheduleApplyDatabase()(module)
executable = tvm.compile(module, target)
machine = relax.VirtualMachine(executable, tvm.cpu())
output = machine["main"](tvm.runtime.tensor(example.numpy()))[0].numpy()
expected = model(example).detach().numpy()
print("largest difference to PyTorch:", abs(output - expected).max())
