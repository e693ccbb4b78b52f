"""The check of simulated devices: its arithmetic, its kernels written by hand, and the goals that are met."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_simulation as bench
import library_kernels

from tvm_energy.simulation.devices import H200
from tvm_energy.simulation.gpu import simulate


def test_errors_are_relative_to_what_was_measured() -> None:
    seconds, watts = np.array([1.0, 2.0, 4.0]), np.array([100.0, 200.0, 300.0])
    same = bench.compare(seconds, seconds, watts, watts)
    assert same["latency_error"] == same["power_error"] == same["energy_error"] == 0
    slow = bench.compare(2 * seconds, seconds, watts / 2, watts)
    assert slow["latency_error"] == slow["latency_mean_error"] == 1
    assert slow["power_ratio"] == slow["power_error"] == 0.5
    assert slow["energy_error"] == slow["latency_within_goal"] == 0
    assert bench.compare(seconds[::-1], seconds, watts, watts)["latency_rank"] == pytest.approx(-1)


def test_neighbours_in_rates_bound_what_a_model_can_reach() -> None:
    rates = np.repeat(np.array([[1e14, 1e11], [5e14, 1e12], [1e12, 4e12]]), 2, axis=0)
    assert bench.neighbour_error(rates, np.array([100.0, 100, 200, 200, 300, 300])) == 0
    assert bench.neighbour_error(rates, np.array([100.0, 200, 100, 200, 100, 200])) >= 0.5


@pytest.mark.parametrize("name", bench.SHAPES)
def test_calibration_and_check_share_no_row(name: str) -> None:
    parts = [
        {tuple(row.values()) for row in bench.shape_rows(name, part, 10**6)}
        for part in ("calibrate", "check")
    ]
    assert not parts[0] & parts[1]
    assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_pairs_of_like_latency() -> None:
    pool = np.array([[1.0, 1.0], [1.02, 1.2], [2.0, 9.0]])
    found = bench.pair_spread([pool])
    assert found["pairs"] == 1
    assert found["median"] == pytest.approx(0.2)
    assert found["sigma"] == pytest.approx(np.log(1.2) / np.sqrt(2))
    assert bench.pair_spread([pool[1:]]) == {"pairs": 0}


def test_a_product_counts_its_operations_and_bytes() -> None:
    (launch,) = library_kernels.gemm(1024, 2048, 512, 128, 256).launches
    assert launch.blocks == 8 * 8
    assert launch.instructions.tensor_flops == 2 * 1024 * 2048 * 512
    by_name = {access.buffer: access for access in launch.global_accesses}
    assert by_name["a"].unique_bytes == 1024 * 512 * 2
    assert by_name["b"].unique_bytes == 2048 * 512 * 2
    assert by_name["c"].bytes_requested == 1024 * 2048 * 2
    (ragged,) = library_kernels.gemm(1025, 2048, 512, 128, 256).launches
    assert ragged.instructions.tensor_flops == 9 / 8 * launch.instructions.tensor_flops
    (split,) = library_kernels.gemm(1024, 2048, 512, 128, 256, split=2).launches
    assert split.blocks == 2 * launch.blocks
    assert split.instructions.tensor_flops == launch.instructions.tensor_flops


def test_a_small_product_wants_its_sum_split() -> None:
    works = {work.launches[0].blocks for work in library_kernels.gemms(16, 1024, 8192)}
    best = bench.gemm_truth(H200, {"m": 16, "n": 1024, "k": 8192})
    unsplit = simulate(H200, library_kernels.gemm(16, 1024, 8192, 16, 64))
    assert len(works) > 3
    assert best.latency_s < 0.7 * unsplit.latency_s


def test_attention_reads_its_cache_once() -> None:
    row = {
        "batch_size": 64,
        "num_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "step": 8191,
    }
    _, demanded = bench.decode_demand(row)
    truth = bench.decode_truth(H200, row)
    assert truth.breakdown["dram_bytes"] == pytest.approx(demanded, rel=0.02)


def test_goals_that_are_met_on_the_checking_half() -> None:
    products = bench.check_shapes("h200_gemm", 60)["good"]
    decode = bench.check_shapes("h200_decode_attention", 200)["good"]
    encoder = bench.check_shapes("h200_encoder_attention", 200)["good"]
    for found in (products, decode, encoder):
        assert found["latency_error"] < bench.GOALS["latency"]
        assert found["latency_rank"] > bench.GOALS["rank"]
    for found in (products, encoder, bench.check_fma(), bench.check_stages()):
        assert found["power_error"] < bench.GOALS["power"]


def test_the_power_equation_fits_kernels_it_was_not_fitted_to() -> None:
    assert bench.check_power_form("micro_teslak40c")["power_error"] < 0.07


def test_some_of_the_spread_is_unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    works = {"bert-qkv": bench.clock_pools.load()["bert-qkv"]}
    spec = bench.find_device("orin-nano")
    found = bench._simulated_spread(spec, works)
    assert found == bench._simulated_spread(spec, works)
    monkeypatch.setattr(bench.gpu, "TIME_SPREAD", 0.0)
    monkeypatch.setattr(bench.gpu, "ENERGY_SPREAD", 0.0)
    assert bench._simulated_spread(spec, works)["median"] < found["median"]
