from __future__ import annotations

import itertools

import pytest

pytest.importorskip("onnx")

import tvm

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.blocks import blocks_of, describe_blocks, divide, time_blocks
from tvm_energy.meta_schedule.clock_sweep import open_sweep
from tvm_energy.meta_schedule.networks import load_onnx, onnx_model_zoo_path
from tvm_energy.simulation.devices import ORIN_NANO
from tvm_energy.simulation.gpu import TIME_SPREAD


def test_divide_joins_pieces_until_they_are_large_enough() -> None:
    assert divide([1, 1, 1, 1], [1, 2, 3], most=4) == [1, 2, 3, 4]
    assert divide([1, 1, 1, 1], [1, 2, 3], most=2) == [2, 4]
    assert divide([1, 1, 1, 1], [1, 3], most=2) == [4]  # the rest after 3 is too small
    assert divide([1, 0, 0], [1, 2], most=3) == [3]
    assert divide([1, 1], [], most=8) == [2]


@pytest.fixture(scope="module")
def alexnet():
    target = tvm.target.Target(ORIN_NANO.target)
    network = load_onnx(onnx_model_zoo_path("alexnet"))
    return target, network, *blocks_of(network, target, 8)


def test_alexnet_is_a_chain_with_the_tensors_of_its_graph(alexnet) -> None:
    _, network, blocks, _ = alexnet
    assert 3 <= len(blocks) <= 8
    assert blocks[0].input_bytes == 4 * 3 * 224 * 224
    assert blocks[-1].output_bytes == 4 * 1000
    for before, after in itertools.pairwise(blocks):
        assert before.output_bytes == after.input_bytes
    assert len({block.name for block in blocks}) == len(blocks)
    # 0.65 G multiply-adds with grouped convolutions (Krizhevsky et al., 2012: 0.7 G).
    assert sum(block.flop for block in blocks) == pytest.approx(1.35e9, rel=0.1)
    with pytest.raises(ConfigurationError):
        blocks_of(network, tvm.target.Target(ORIN_NANO.target), 0)


def test_blocks_add_up_to_the_whole(alexnet) -> None:
    target, _, blocks, module = alexnet
    times = time_blocks(describe_blocks(blocks, module, target), ORIN_NANO)
    assert times.clocks_mhz.tolist() == list(ORIN_NANO.clocks_mhz)
    # Only the unexplained factor differs: each block and the whole have their own, of 0 to 4 spreads.
    assert times.latency_s.sum(axis=0) == pytest.approx(
        times.whole_latency_s, rel=4.5 * TIME_SPREAD
    )
    assert times.energy_j.sum(axis=0) == pytest.approx(times.whole_energy_j, rel=0.2)
    assert (times.latency_s[:, 0] > times.latency_s[:, -1]).all()


def test_a_sweep_measures_the_blocks_of_a_network(alexnet) -> None:
    """Simulated sensors and noise against the simulator's own truth, at two clocks."""
    target, network, blocks, module = alexnet
    times = time_blocks(describe_blocks(blocks, module, target), ORIN_NANO)
    with open_sweep("sim:orin-nano", network=network, blocks=8) as opened:
        assert opened.names == [block.name for block in blocks]
        for column in (2, -1):
            clock = float(times.clocks_mhz[column])
            with opened.locked(clock):
                points = opened.measure(clock)
            assert [point.effective_mhz for point in points] == [clock] * len(blocks)
            # The unexplained factors of a block and of its kernels differ, see above.
            assert [point.latency_s for point in points] == pytest.approx(
                times.latency_s[:, column], rel=4.5 * TIME_SPREAD
            )
            assert [point.latency_s * point.power_w for point in points] == pytest.approx(
                times.energy_j[:, column], rel=0.2
            )
