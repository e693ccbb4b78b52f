"""From a log to numbers and to a database that plain TVM deploys. Needs no device.

python docs/examples/replay_and_deploy.py out --to deploy
"""

import argparse

import tvm_energy
from tvm_energy.meta_schedule.export import export

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("work_dir")
parser.add_argument("--to", default="deploy")
arguments = parser.parse_args()

# The log holds raw times and energies, so it can be ranked anew under any objective.
for objective in ("latency", "energy", "edp", "energy:slack=0.02"):
    totals = tvm_energy.summarize(arguments.work_dir, objective).totals
    if totals is not None:
        energy = "not measured" if totals.best_energy_j is None else f"{totals.best_energy_j:.3g} J"
        print(f"{objective:>18}: {totals.best_latency_s:.3g} s, {energy} for all calls")

manifest = export(arguments.work_dir, arguments.to, objective="edp")
print(f"{len(manifest['kernels'])} kernels in {arguments.to}. Where only TVM is installed:")
print("  from tvm.s_tir import meta_schedule as ms")
print(f"  database = ms.database.JSONDatabase(work_dir={arguments.to!r})")
print("  with target, database:")
print("      mod = tvm.relax.transform.MetaScheduleApplyDatabase()(mod)")
