from __future__ import annotations

import json

import pytest

from tvm_energy.errors import ConfigurationError
from tvm_energy.simulation.kernel import (
    GlobalAccess,
    Instructions,
    KernelLaunch,
    KernelWork,
    SharedTraffic,
)


def work(**changes: object) -> KernelWork:
    access = GlobalAccess(
        buffer="a",
        store=False,
        requests=64.0,
        bytes_requested=8192.0,
        sectors=256.0,
        lines=64.0,
        block_reuse=((0.0, 4096.0), (1024.0, 2048.0)),
        launch_reuse=((1.0, 2048.0), (2.0, 4096.0)),
    )
    values: dict[str, object] = {
        "name": "k",
        "blocks": 2,
        "threads_per_block": 96,
        "instructions": Instructions(fma32=10.0, fp32=5.0),
        "global_accesses": (access,),
        "shared": SharedTraffic(load_requests=4.0, load_wavefronts=8.0, load_bytes=512.0),
    }
    return KernelWork(launches=(KernelLaunch(**{**values, **changes}),))  # type: ignore[arg-type]


def test_json_round_trip() -> None:
    original = work()
    text = json.dumps(original.to_json())
    assert KernelWork.from_json(json.loads(text)) == original


def test_digest_follows_content_and_not_names() -> None:
    assert work(name="other").digest == work().digest
    assert work(blocks=3).digest != work().digest


def test_flops_count_a_fused_multiply_add_twice() -> None:
    assert work().flops == (2 * 10 + 5) * 32
    assert work(lane_share=0.5).flops == (2 * 10 + 5) * 16


def test_a_last_warp_may_be_partly_empty() -> None:
    assert work(threads_per_block=33).launches[0].warps_per_block == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": 0},
        {"threads_per_block": 1025},
        {"threads_per_block": 0},
        {"lane_share": 0.0},
        {"lane_share": 1.5},
        {"ilp": float("nan")},
        {"barriers_per_block": -1.0},
        {"registers_per_thread": "many"},
    ],
)
def test_values_that_make_no_sense_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        work(**changes)


def test_a_kernel_needs_a_launch() -> None:
    with pytest.raises(ConfigurationError, match="at least one launch"):
        KernelWork(launches=())


@pytest.mark.parametrize("place", ["launches", "instructions", "global_accesses", "shared"])
def test_broken_json_is_refused(place: str) -> None:
    values = work().to_json()
    if place == "launches":
        values["launches"] = 7
    else:
        values["launches"][0][place] = {"wrong": 1}
    with pytest.raises(ConfigurationError):
        KernelWork.from_json(values)


def test_curves_must_be_sorted_and_finite() -> None:
    values = work().to_json()
    values["launches"][0]["global_accesses"][0]["launch_reuse"] = [[2.0, 1.0], [1.0, 1.0]]
    with pytest.raises(ConfigurationError, match="sorted"):
        KernelWork.from_json(values)
    values["launches"][0]["global_accesses"][0]["launch_reuse"] = []
    with pytest.raises(ConfigurationError, match="needs a point"):
        KernelWork.from_json(values)
