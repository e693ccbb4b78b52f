"""The benchmark of the joint choice: its choices stand in the order that they must."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_joint
import clock_pools

from tvm_energy.simulation.devices import find_device


@pytest.fixture(scope="module")
def pools() -> list[bench_joint.Pool]:
    spec = find_device("orin-nano")
    works = clock_pools.load()
    return [bench_joint.pool_of(spec, name, works[name][:30]) for name in ("bert-qkv", "bert-mv")]


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.25])
def test_no_choice_beats_the_joint_one(pools: list[bench_joint.Pool], slack: float) -> None:
    for some in ([pools[0]], [pools[1]], pools):
        found = bench_joint.compare(some, slack, seed=1)
        joint = found["joint"]["energy_ratio"]
        for name in ("kernel", "clock", "kernel_then_clock"):
            assert found[name]["energy_ratio"] >= joint - 1e-4
            assert found[name]["latency_ratio"] <= 1 + slack + 1e-4
        assert found["kernel_then_clock"]["energy_ratio"] <= found["kernel"]["energy_ratio"]
        # Noise lets a choice exceed its limit a little.
        assert found["found"]["latency_ratio"] <= 1 + slack + 5e-3
        assert joint - 0.02 <= found["found"]["energy_ratio"] <= joint + 0.05
    assert found["per_kernel"]["energy_ratio"] <= joint + 1e-4
