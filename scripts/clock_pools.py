"""Pools of real MetaSchedule kernels as what they do on a GPU, so that any device and clock can be simulated.

For each workload a search for low latency on each of two devices (candidate_pools.generate); their kernels
together, every one once. Written by ``python scripts/clock_pools.py``, read by ``bench_joint.py``.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from candidate_pools import generate

from tvm_energy.json_lines import parse_line
from tvm_energy.simulation.kernel import KernelWork

FILE = Path(__file__).parent / "data" / "kernel_pools.json.xz"
DEVICES = ("a100", "rtx4090", "orin-nano")
#: From BERT-base, LLaMA-7B and ResNet-50, as in bench_energy.py.
WORKLOADS = {
    "bert-qkv": "matmul:m=128,n=768,k=768",
    "llama-proj": "matmul:m=128,n=4096,k=4096",
    "bert-mv": "matvec:m=3072,k=768",
    "llama-mv": "matvec:m=4096,k=4096",
    "resnet-1x1": "conv2d:n=1,ci=64,co=256,h=56,w=56,kernel=1,padding=0",
}
#: Device that a search is for, and its rounds of 48 candidates, the first at random.
SEARCHES = (("a100", 3), ("orin-nano", 2))
_LONGEST = 64 << 20


def load() -> dict[str, list[KernelWork]]:
    """Kernels by name of the workload."""
    with lzma.open(FILE, "rt", encoding="utf-8") as file:
        pools = parse_line(file.read(_LONGEST), _LONGEST)
    return {name: [KernelWork.from_json(item) for item in items] for name, items in pools.items()}


def main() -> None:
    pools = {}
    for name, spec in WORKLOADS.items():
        works: dict[str, KernelWork] = {}
        for device, rounds in SEARCHES:
            devices = [device, *(other for other in DEVICES if other != device)]
            found = generate(spec, devices, rounds=rounds, batch=48, seed=1)
            works |= {work.digest: work for work in found.works}
        print(f"{name}: {len(works)} kernels", file=sys.stderr, flush=True)
        pools[name] = [work.to_json() for work in works.values()]
        with lzma.open(FILE, "wt", encoding="utf-8", preset=9) as file:
            json.dump(pools, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
