"""A simulated card under the real measuring code, in virtual time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from simulation.kernels import fma_loop, stream

from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.protocol import measure
from tvm_energy.simulation.devices import A100, H200, RTX4090, DeviceSpec
from tvm_energy.simulation.gpu import TIME_SPREAD, simulate
from tvm_energy.simulation.load import SimulatedGpu
from tvm_energy.simulation.timeline import VirtualClock

WORK = fma_loop(blocks=216, fmas=1e8)


def test_queueing_takes_no_time_and_synchronizing_does() -> None:
    gpu = SimulatedGpu(A100)
    load = gpu.load(WORK)
    load.enqueue(100)
    assert gpu.clock.now() == 0
    assert gpu.running() is not None
    load.synchronize()
    assert gpu.clock.now() == pytest.approx(100 * gpu.truth(WORK).latency_s, rel=0.01)
    assert gpu.running() is None


def test_queues_of_two_loads_follow_each_other() -> None:
    gpu = SimulatedGpu(A100)
    other = stream(2**26)
    gpu.load(WORK).enqueue(10)
    gpu.load(other).enqueue(10)
    gpu.synchronize()
    expected = 10 * (gpu.truth(WORK).latency_s + gpu.truth(other).latency_s)
    assert gpu.clock.now() == pytest.approx(expected, rel=0.01)


def test_energy_on_the_time_line_is_that_of_the_kernel() -> None:
    gpu = SimulatedGpu(A100)
    gpu.load(WORK).enqueue(1000)
    gpu.synchronize()
    end_s = gpu.clock.now()
    expected = 1000 * gpu.truth(WORK).energy_j
    assert gpu.timeline.energy_j(0, end_s) == pytest.approx(expected, rel=0.03)
    gpu.clock.sleep(2)
    assert gpu.timeline.mean_power_w(end_s, end_s + 2) == pytest.approx(A100.idle_power_w)


def test_load_heats_the_die_and_idling_cools_it() -> None:
    gpu = SimulatedGpu(A100)
    cold_c, first_w = gpu.temperature_c(), None
    for _ in range(60):
        gpu.load(WORK).enqueue(3000)
        truth = gpu.running()
        assert truth is not None
        first_w = truth.power_w if first_w is None else first_w
        last_w = truth.power_w
        gpu.synchronize()
    hot_c = gpu.temperature_c()
    steady_c = A100.ambient_c + A100.thermal_resistance_c_per_w * last_w
    assert cold_c < hot_c < steady_c + 0.1
    assert hot_c > 0.8 * steady_c
    assert last_w > first_w  # leakage
    gpu.clock.sleep(10 * A100.thermal_time_constant_s)
    assert gpu.temperature_c() == pytest.approx(cold_c, abs=0.1)


def test_run_times_scatter_by_one_percent_around_the_truth() -> None:
    gpu = SimulatedGpu(A100, seed=3)
    times = np.array(gpu.latency(WORK, 2000))
    assert times.mean() == pytest.approx(gpu.truth(WORK).latency_s, rel=0.002)
    assert 0.008 < times.std() / times.mean() < 0.012


def test_the_same_seed_gives_the_same_card() -> None:
    first, again, other = (SimulatedGpu(A100, seed=seed) for seed in (1, 1, 2))
    assert first.latency(WORK, 3) == again.latency(WORK, 3)
    assert first.truth(WORK) == again.truth(WORK)
    ratio = other.truth(WORK).latency_s / first.truth(WORK).latency_s
    assert ratio != 1
    assert abs(ratio - 1) < 5 * TIME_SPREAD


def test_a_locked_clock_is_used() -> None:
    slow = SimulatedGpu(A100, clock_mhz=705)
    assert slow.truth(WORK).clock_mhz == 705
    assert slow.truth(WORK, clock_mhz=1410).clock_mhz == 1410
    slow.load(WORK).enqueue(10)
    assert slow.state().clock_mhz == 705


def test_negative_launches_are_refused() -> None:
    with pytest.raises(ValueError, match="launches"):
        SimulatedGpu(A100).load(WORK).enqueue(-1)


@pytest.mark.parametrize("spec", [A100, RTX4090, H200], ids=lambda spec: spec.name)
def test_a_measurement_finds_the_truth_behind_the_sensor(spec: DeviceSpec) -> None:
    gpu = SimulatedGpu(spec, clock=VirtualClock(), seed=5)
    sensor = gpu.nvml().sensor
    meter = open_nvml_meter(nvml=gpu.nvml(), time=gpu.clock)
    assert meter.info.simulated
    assert meter.info.max_power_w == spec.power_limit_w
    work = stream(2**28)
    found = measure(gpu.load(work), meter, MeasurementPlan())
    truth = simulate(spec, work, temperature_c=found.temperature_c, seed=5)
    seen_w = sensor.gain * truth.power_w + sensor.offset_w
    assert found.simulated
    assert found.latency_s == pytest.approx(truth.latency_s, rel=0.01)
    assert found.power_w == pytest.approx(seen_w, rel=0.02)
    assert found.clock_mhz == truth.clock_mhz


def test_measuring_costs_little_real_time() -> None:
    gpu = SimulatedGpu(A100)
    meter = open_nvml_meter(nvml=gpu.nvml(), time=gpu.clock)
    costs_s = []
    for repeat in range(5):
        load = gpu.load(fma_loop(blocks=216, fmas=1e7 + repeat))
        started_s = time.process_time()
        measure(load, meter, MeasurementPlan())
        costs_s.append(time.process_time() - started_s)
    assert min(costs_s) < 0.05
