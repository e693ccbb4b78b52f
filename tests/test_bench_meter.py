"""The protocol benchmark, on few runs: what it is for shows, and its traces are what they claim to be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_meter  # noqa: E402
import power_traces  # noqa: E402


@pytest.fixture(scope="module")
def sensors() -> dict[str, dict[str, dict[str, float]]]:
    return bench_meter.bench_sensors(25)


def test_the_goals_are_met_on_every_sensor(sensors) -> None:
    assert set(sensors) == {"a100", "hopper", "ada", "volta"}
    for protocols in sensors.values():
        ours = protocols["tvm_energy"]
        assert ours["runs"] == 25
        assert ours["median_error"] <= bench_meter.GOALS["median_error"]
        assert ours["p95_error"] <= bench_meter.GOALS["p95_error"]
        assert ours["seconds"] <= bench_meter.GOALS["seconds"]
        assert ours["coverage"] >= 0.84  # 25 runs: 95 % less two and a half standard deviations
        assert protocols["kernel_tuner"]["coverage"] is None


def test_the_usual_protocols_fail_where_they_should(sensors) -> None:
    """The benchmark would be worthless if every protocol did well."""
    assert sensors["ada"]["polled_draw"]["median_error"] > 0.1  # a mean of the last second
    assert sensors["a100"]["before_after"]["p95_error"] > 0.03  # a counter that moves every 100 ms
    for protocols in sensors.values():
        ours = protocols["tvm_energy"]["p95_error"]
        for usual in ("kernel_tuner", "before_after", "polled_draw"):
            assert ours < protocols[usual]["p95_error"]


def test_goals_can_be_missed(sensors) -> None:
    assert all(bench_meter.goals_met(sensors)[key] for key in ("median_error", "p95_error"))
    worse = {"a100": {"tvm_energy": {**sensors["a100"]["tvm_energy"], "median_error": 0.02}}}
    assert not bench_meter.goals_met(worse)["median_error"]


def test_the_external_meter_and_the_recorded_sensor() -> None:
    """Published: nvidia-smi reads 5 to 6 % low on both cards (arXiv:2312.02741)."""
    for name in ("transient_A100", "transient_3090"):
        trace = power_traces.load_trace(name)
        span = (1.0, trace.load_ends_s - 0.1)
        assert 0.93 < trace.sensor_mean_w(*span) / trace.mean_power_w(*span) < 0.97
    wave = power_traces.load_trace("sq5050_A100")
    assert wave.latency_s == pytest.approx(0.1043, rel=0.01)
    assert 100 < wave.mean_power_w(1.0, 6.0) < 150


def test_a_recorded_sensor_is_measured() -> None:
    trace = power_traces.load_trace("transient_3090")
    card = power_traces.ReplayCard(trace, power_traces.CARDS["3090"], recorded=True, seed=0)
    meter = bench_meter.open_meter(card.nvml, "power")
    assert meter.info.update_period_s == pytest.approx(0.1, rel=0.05)
    card.clock.advance_to(1.0)
    outcome = bench_meter.tvm_energy(card, meter, 0)
    truth_j = trace.mean_power_w(1.0, 5.0) * trace.latency_s
    assert outcome.energy_j == pytest.approx(0.95 * truth_j, rel=0.01)  # its gain
    with_counter = power_traces.ReplayCard(trace, power_traces.CARDS["3090"], False, 0)
    meter = bench_meter.open_meter(with_counter.nvml, None)
    with_counter.clock.advance_to(1.0)
    assert meter.info.method == "counter"
    outcome = bench_meter.tvm_energy(with_counter, meter, 0)
    assert outcome.energy_j == pytest.approx(truth_j, rel=0.01)


def test_real_counter_logs() -> None:
    """Runs of 60 ms under a counter that moves every 100 ms: a third of them read zero."""
    logs = power_traces.bench_counter_logs(bench_meter.Score, lambda *_: None)
    shortest = logs["icicle 2^21 (0.0607 s a run)"]
    assert shortest["before_after"]["zeros"] > 0.2
    assert shortest["before_after"]["median_error"] > 0.3
    assert shortest["before_after_ten_runs"]["median_error"] < 0.1
    longest = logs["cuzk 2^24 (2.08 s a run)"]
    assert longest["before_after"]["zeros"] == 0
    assert longest["before_after"]["median_error"] < 0.02
