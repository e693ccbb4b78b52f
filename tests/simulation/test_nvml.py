from __future__ import annotations

import dataclasses
import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_gpu import TRUE_SENSOR, VirtualGpu

from tvm_energy.meters.nvml import list_gpus, open_nvml_meter
from tvm_energy.simulation.nvml import (
    A100_SENSOR,
    ADA_SENSOR,
    HOPPER_SENSOR,
    VOLTA_SENSOR,
    SensorSpec,
    SimulatedNvmlError,
)
from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock

QUIET = dataclasses.replace(TRUE_SENSOR, noise_w=0.0, update_jitter_s=0.0, call_cost_s=0.0)


def opened(gpu: VirtualGpu) -> str:
    gpu.nvml.nvmlInit()
    return gpu.nvml.nvmlDeviceGetHandleByIndex(0)


# ---- virtual time and power ---------------------------------------------------------------------


def test_the_clock_moves_only_when_told() -> None:
    clock = VirtualClock(3.0)
    assert clock.now() == 3.0
    clock.sleep(1.5)
    clock.advance(0.5)
    clock.advance_to(4.0)  # passed already
    assert clock.now() == 5.0
    clock.advance_to(6.0)
    assert clock.now() == 6.0
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="seconds"):
            clock.sleep(seconds)


def test_energy_between_any_two_moments() -> None:
    timeline = PowerTimeline(10.0)
    timeline.append(1.0, 2.0, 100.0)
    timeline.append(4.0, 1.0, 200.0)
    assert timeline.energy_j(0.0, 1.0) == pytest.approx(10.0)
    assert timeline.energy_j(2.0, 4.5) == pytest.approx(100 + 10 + 100)
    assert timeline.energy_j(0.0, 10.0) == pytest.approx(10 + 200 + 10 + 200 + 50)
    assert timeline.mean_power_w(1.0, 3.0) == pytest.approx(100.0)
    assert timeline.end_s == 5.0


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1000)), min_size=1, max_size=20
    ),
    st.floats(0, 200),
    st.floats(0, 200),
)
def test_energy_is_the_sum_over_segments(
    segments: list[tuple[float, float, float]], t0: float, t1: float
) -> None:
    t0, t1 = sorted((t0, t1))
    timeline, at, laid = PowerTimeline(7.0), 0.0, []
    for gap_s, duration_s, power_w in segments:
        start_s = at + gap_s
        timeline.append(start_s, duration_s, power_w)
        laid.append((start_s, start_s + duration_s, power_w))
        at = start_s + duration_s
    expected = 7.0 * (t1 - t0)
    for start_s, end_s, power_w in laid:
        expected += (power_w - 7.0) * max(0.0, min(end_s, t1) - max(start_s, t0))
    assert timeline.energy_j(t0, t1) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_timeline_stays_small_and_exact_over_hours() -> None:
    timeline = PowerTimeline(50.0, history_s=10.0)
    for index in range(100_000):
        timeline.append(index * 0.1, 0.05, 100.0 + index % 2)
    assert len(timeline._starts_s) < 10_000
    assert timeline.cumulative_j(10_000.0) == pytest.approx(100_000 * 0.05 * 150.5)
    with pytest.raises(ValueError, match="forgotten"):
        timeline.energy_j(1.0, 2.0)


def test_a_timeline_refuses_nonsense() -> None:
    timeline = PowerTimeline(10.0)
    timeline.append(0.0, 2.0, 50.0)
    for start_s, duration_s, power_w in [
        (1.0, 1.0, 50.0),
        (3.0, -1.0, 50.0),
        (3.0, 1.0, -5.0),
        (3.0, 1.0, math.nan),
        (3.0, math.inf, 5.0),
    ]:
        with pytest.raises(ValueError, match=r"overlaps|must be"):
            timeline.append(start_s, duration_s, power_w)
    with pytest.raises(ValueError, match="backwards"):
        timeline.energy_j(2.0, 1.0)
    with pytest.raises(ValueError, match="mean"):
        timeline.mean_power_w(1.0, 1.0)
    with pytest.raises(ValueError, match="idle_power_w"):
        PowerTimeline(-1.0)


# ---- the sensor ---------------------------------------------------------------------------------


def test_the_counter_moves_once_in_a_period_and_counts_the_truth() -> None:
    gpu = VirtualGpu(QUIET)
    handle = opened(gpu)
    gpu.load(1.0, 200.0).enqueue(10)
    values = []
    for _ in range(2000):
        gpu.clock.advance(1e-3)
        values.append(gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    assert 19 <= len(set(values)) <= 21
    assert sorted(values) == values
    seen_j = (values[-1] - values[500]) * 1e-3
    updates = len(set(values[500:])) - 1
    assert seen_j == pytest.approx(updates * 0.1 * 200.0, rel=1e-3)


def test_an_instant_reading_is_the_mean_over_its_window_and_held() -> None:
    """25 ms of every 100 ms are seen: a square wave of 100 ms is read as one of its levels."""
    gpu = VirtualGpu(QUIET)
    handle = opened(gpu)
    for index in range(40):
        gpu.timeline.append(index * 0.1, 0.05, 300.0)  # 50 ms on, 50 ms off
    seen = []
    for _ in range(30):
        gpu.clock.advance(0.1)
        field = gpu.nvml.nvmlDeviceGetFieldValues(handle, [(186, 0)])[0]
        assert field.nvmlReturn == 0
        seen.append(field.value.uiVal * 1e-3)
    assert pstdev(seen) < 1e-3  # aliased: the same part of the wave each time
    assert gpu.timeline.mean_power_w(0.0, 3.0) == pytest.approx(175.0)
    average = gpu.nvml.nvmlDeviceGetFieldValues(handle, [(185, 0)])[0]
    assert average.value.uiVal * 1e-3 == pytest.approx(175.0, rel=0.02)


@pytest.mark.parametrize(
    ("sensor", "period_s"),
    [(A100_SENSOR, 0.1), (ADA_SENSOR, 0.1), (HOPPER_SENSOR, 0.1), (VOLTA_SENSOR, 0.02)],
)
def test_published_classes_have_their_period_and_source(
    sensor: SensorSpec, period_s: float
) -> None:
    assert "arXiv:2312.02741" in sensor.source
    meter = open_nvml_meter(nvml=VirtualGpu(sensor, idle_power_w=60.0).nvml)
    assert meter.info.update_period_s == pytest.approx(period_s, rel=0.03)


def test_gain_and_offset_of_a_card() -> None:
    gpu = VirtualGpu(dataclasses.replace(QUIET, gain=1.044, offset_w=-22.6))
    handle = opened(gpu)
    gpu.load(1.0, 300.0).enqueue(20)
    gpu.clock.advance(5.0)
    assert gpu.nvml.nvmlDeviceGetPowerUsage(handle) == round((1.044 * 300 - 22.6) * 1e3)
    first = gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    gpu.clock.advance(10.0)
    counted_w = (gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first) * 1e-4
    assert counted_w == pytest.approx(1.044 * 300 - 22.6, rel=0.001)


def test_readings_are_never_negative() -> None:
    gpu = VirtualGpu(dataclasses.replace(QUIET, offset_w=-100.0))
    handle = opened(gpu)
    first = gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    gpu.clock.advance(3.0)
    assert gpu.nvml.nvmlDeviceGetPowerUsage(handle) == 0
    assert gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == first


def test_noise_is_that_of_the_specification() -> None:
    gpu = VirtualGpu(dataclasses.replace(QUIET, noise_w=2.0))
    handle = opened(gpu)
    seen = []
    for _ in range(500):
        gpu.clock.advance(0.1)
        seen.append(gpu.nvml.nvmlDeviceGetPowerUsage(handle) * 1e-3)
    assert pstdev(seen) == pytest.approx(2.0, rel=0.15)
    assert fmean(seen) == pytest.approx(50.0, abs=0.4)


def test_a_counter_that_nobody_reads_for_hours_loses_nothing() -> None:
    gpu = VirtualGpu(QUIET)
    handle = opened(gpu)
    first = gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    load = gpu.load(0.5, 250.0)
    for _ in range(20_000):
        load.enqueue(1)
        load.synchronize()
        gpu.clock.advance(0.5)
    counted_j = (gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first) * 1e-3
    assert counted_j == pytest.approx(20_000 * 0.5 * (250 + 50), rel=1e-4)


def test_calls_cost_virtual_time() -> None:
    gpu = VirtualGpu(dataclasses.replace(QUIET, call_cost_s=1e-4))
    handle = opened(gpu)
    before_s = gpu.clock.now()
    for _ in range(10):
        gpu.nvml.nvmlDeviceGetPowerUsage(handle)
    assert gpu.clock.now() - before_s == pytest.approx(1e-3)


def test_errors_are_like_those_of_nvml() -> None:
    gpu = VirtualGpu()
    with pytest.raises(SimulatedNvmlError) as caught:
        gpu.nvml.nvmlDeviceGetCount()
    assert caught.value.value == 1  # uninitialised
    handle = opened(gpu)
    for call, code in [
        (lambda: gpu.nvml.nvmlDeviceGetHandleByIndex(1), 2),
        (lambda: gpu.nvml.nvmlDeviceGetHandleByUUID("GPU-other"), 6),
        (lambda: gpu.nvml.nvmlDeviceGetPowerUsage("other"), 2),
        (lambda: gpu.nvml.nvmlDeviceGetMigMode(handle), 3),
        (lambda: gpu.nvml.nvmlDeviceGetClockInfo(handle, 2), 3),
    ]:
        with pytest.raises(gpu.nvml.NVMLError) as caught:
            call()
        assert caught.value.value == code


def test_what_it_measures_is_called_simulated() -> None:
    gpu = VirtualGpu()
    (info,) = list_gpus(gpu.nvml)
    assert info.name == "Simulated test card"
    meter = open_nvml_meter(nvml=gpu.nvml)
    assert meter.info.simulated
    assert meter.info.meter == "simulated"
    assert meter.time is gpu.clock
    assert meter.state().clock_mhz == 1410
    meter.close()
    meter.close()
    with pytest.raises(SimulatedNvmlError):
        gpu.nvml.nvmlShutdown()  # everything that was opened has been closed


@pytest.mark.parametrize("name", ["update_period_s", "averaging_window_s", "gain"])
def test_a_sensor_needs_sensible_figures(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SensorSpec(**{name: 0.0})
    with pytest.raises(ValueError, match="noise_w"):
        SensorSpec(noise_w=-1.0)
