"""A script that tunes with stock MetaSchedule, made energy-aware by the three lines marked (1) to (3).

python docs/examples/existing_script.py --trials 64 --work-dir out-existing
"""

import argparse

import tvm
from tvm.s_tir import meta_schedule as ms

import tvm_energy  # (1)
from tvm_energy.meta_schedule.workloads import parse_workload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--trials", type=int, default=64)
parser.add_argument("--work-dir", default="out-existing")
arguments = parser.parse_args()

target = tvm.target.Target("nvidia/nvidia-a100")
mod = parse_workload("softmax:rows=512,cols=512").primfunc()
with tvm_energy.options(
    target, arguments.work_dir, objective="edp", device="sim:a100"
) as parts:  # (2)
    database = ms.tune_tir(
        mod,
        target,
        arguments.work_dir,
        arguments.trials,
        num_trials_per_iter=min(16, arguments.trials),
        **parts,  # (3)
    )

schedule = ms.tir_integration.compile_tir(database, mod, target)
if schedule is None:
    raise SystemExit("no kernel was found; try more --trials")
schedule.mod.show()
