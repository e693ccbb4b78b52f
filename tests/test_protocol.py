from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
from virtual_gpu import TRUE_SENSOR, BlockingLoad, ScriptedMeter, VirtualGpu, VirtualLoad

from tvm_energy.errors import MeasurementError, MeasurementTooShort, MeterUnavailable
from tvm_energy.measurement import (
    FINALIST_PLAN,
    NO_SCATTER,
    EnergyMeasurement,
    MeasurementPlan,
    WindowScatter,
)
from tvm_energy.meters.base import Load, PowerMeter
from tvm_energy.meters.nvml import NvmlMeter, open_nvml_meter
from tvm_energy.protocol import measure, measure_idle_power, measure_interleaved
from tvm_energy.simulation.nvml import ADA_SENSOR, VOLTA_SENSOR, SensorSpec, SimulatedState

PLAN = MeasurementPlan()
LATENCY_S, POWER_W = 37e-6, 211.0
TRUTH_J = LATENCY_S * POWER_W

SENSORS = {
    "A100 counter": (TRUE_SENSOR, None),
    "A100 instant": (TRUE_SENSOR, "instant"),
    "Ada 1 s average": (dataclasses.replace(ADA_SENSOR, gain=1.0, offset_w=0.0), "usage"),
    "Volta counter": (VOLTA_SENSOR, None),
    "very noisy counter": (dataclasses.replace(TRUE_SENSOR, noise_w=5.0), None),
    "very noisy power": (dataclasses.replace(TRUE_SENSOR, noise_w=5.0), "instant"),
}


def measured(result: EnergyMeasurement | MeasurementError) -> EnergyMeasurement:
    assert isinstance(result, EnergyMeasurement), result
    return result


def rig(
    sensor: SensorSpec = TRUE_SENSOR, field: str | None = None, seed: int = 0
) -> tuple[VirtualGpu, NvmlMeter]:
    gpu = VirtualGpu(sensor, seed=seed)
    return gpu, open_nvml_meter(nvml=gpu.nvml, field=field)  # type: ignore[arg-type]


# ---- is the truth recovered, and are the error bars honest? -------------------------------------


@pytest.mark.parametrize("name", SENSORS)
@pytest.mark.parametrize("latency_s", [1e-6, 3e-4, 0.007, 0.03, 0.3])
def test_a_constant_load_is_recovered_within_error_bars(name: str, latency_s: float) -> None:
    gpu, meter = rig(*SENSORS[name])
    plan = dataclasses.replace(PLAN, budget_s=20.0)
    result = measure(gpu.load(latency_s, POWER_W), meter, plan)
    error_j = abs(result.energy_j - latency_s * POWER_W)
    if "very noisy" in name:  # two windows that agree by chance are seen in the next test
        assert error_j < 0.02 * latency_s * POWER_W
    else:
        assert error_j < 4 * result.stderr_j
    assert 0 < result.relative_stderr < 0.03
    assert result.latency_s == pytest.approx(latency_s, rel=1e-9)
    assert result.power_w == pytest.approx(POWER_W, rel=0.03)
    assert result.windows >= 2
    assert result.simulated
    assert result.meter == "simulated"
    assert result.method == meter.info.method


@pytest.mark.parametrize("name", SENSORS)
def test_error_bars_are_honest(name: str) -> None:
    sensor, field = SENSORS[name]
    deviations = []
    for seed in range(200):
        gpu, meter = rig(sensor, field, seed)
        plan = dataclasses.replace(PLAN, seed=seed)
        result = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
        deviations.append((result.energy_j - TRUTH_J) / result.stderr_j)
    covered = sum(abs(z) <= 2 for z in deviations) / len(deviations)
    bias = sum(deviations) / len(deviations)
    print(f"{name}: {covered:.1%} within 2 standard errors, mean deviation {bias:.2f}")
    # 95 % of 200 is 190 +- 3.
    assert covered >= 0.90
    assert abs(bias) < 0.35
    # Bars that are always far too wide would be no measurement either.
    assert max(map(abs, deviations)) > 0.5


def test_interleaved_error_bars_are_honest_and_narrower() -> None:
    """Kernels measured together share what they tell about the scatter of windows."""
    sensor = dataclasses.replace(TRUE_SENSOR, noise_w=5.0)
    deviations, together, alone = [], [], []
    for seed in range(25):
        gpu, meter = rig(sensor, None, seed)
        loads = [gpu.load(LATENCY_S, POWER_W) for _ in range(8)]
        plan = dataclasses.replace(PLAN, target_relative_stderr=0.5, seed=seed)
        for result in map(measured, measure_interleaved(loads, meter, plan)):
            deviations.append((result.energy_j - TRUTH_J) / result.stderr_j)
            together.append(result.stderr_j * math.sqrt(result.windows))
        single = measure(loads[0], meter, plan)
        alone.append(single.stderr_j * math.sqrt(single.windows))
    covered = sum(abs(z) <= 2 for z in deviations) / len(deviations)
    assert 0.90 <= covered <= 0.99
    assert sum(together) / len(together) < sum(alone) / len(alone)


def test_alignment_beats_two_plain_readings() -> None:
    """Reading a counter before and after a run errs by up to an update at each end."""
    plain, aligned = [], []
    for seed in range(60):
        gpu, meter = rig(seed=seed)
        load = gpu.load(LATENCY_S, POWER_W)
        for _ in range(50):  # warm
            load.enqueue(round(0.02 / LATENCY_S))
            load.synchronize()
        before_j, launches = meter.read().energy_j, round((1 + seed / 600) / LATENCY_S)
        load.enqueue(launches)
        load.synchronize()
        after_j = meter.read().energy_j
        assert before_j is not None
        assert after_j is not None
        plain.append((after_j - before_j) / launches / TRUTH_J - 1)
        one = dataclasses.replace(PLAN, window_s=1.0, min_windows=1, max_windows=1)
        result = measure(load, meter, one)
        assert 0.95 < result.window_s < 1.05  # no better for being longer
        aligned.append(result.energy_j / TRUTH_J - 1)
    rms_plain = math.sqrt(sum(e * e for e in plain) / len(plain))
    rms_aligned = math.sqrt(sum(e * e for e in aligned) / len(aligned))
    print(f"rms error: before/after {rms_plain:.2%}, aligned {rms_aligned:.2%}")
    assert rms_plain > 0.02  # theory: 0.41 x update period / length = 4 %
    assert rms_aligned < 0.1 * rms_plain


def test_one_window_alone_has_the_error_of_its_edges() -> None:
    gpu, meter = rig()
    plan = dataclasses.replace(PLAN, window_s=1.0, min_windows=1, max_windows=1)
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
    assert result.windows == 1
    # Updates located to +-1 ms: 1 ms x sqrt(2/3) of 1 s.
    assert 2e-4 < result.relative_stderr < 3e-3


def test_a_processor_that_blocks_is_measured_like_a_gpu() -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(
        gpu.clock,
        energy_j=lambda t: (
            math.floor(gpu.timeline.cumulative_j(math.floor(t * 1e3) / 1e3) * 1e6) / 1e6
        ),
        update_period_s=1e-3,
    )
    load = BlockingLoad(gpu, 4.2e-4, lambda _: 88.0)
    result = measure(load, meter, PLAN)
    assert abs(result.energy_j - 4.2e-4 * 88.0) < 4 * result.stderr_j + 1e-3 * result.energy_j
    assert result.latency_s == pytest.approx(4.2e-4, rel=5e-3)  # the reading itself takes time
    assert result.clock_mhz is None


def test_windows_are_added_until_the_target_is_met() -> None:
    sensor = dataclasses.replace(TRUE_SENSOR, noise_w=5.0)
    few, many = [], []
    for seed in range(20):
        for target, counts in ((0.5, few), (0.001, many)):
            gpu, meter = rig(sensor, seed=seed)
            plan = dataclasses.replace(PLAN, target_relative_stderr=target)
            counts.append(measure(gpu.load(LATENCY_S, POWER_W), meter, plan).windows)
    assert set(few) == {PLAN.min_windows}
    assert max(many) == PLAN.max_windows
    assert sum(many) > sum(few)


def test_a_missed_target_is_named() -> None:
    gpu, meter = rig(dataclasses.replace(TRUE_SENSOR, noise_w=20.0))
    plan = dataclasses.replace(PLAN, target_relative_stderr=1e-4)
    assert "standard error is" in measure(gpu.load(LATENCY_S, POWER_W), meter, plan).quality


def test_warm_up_is_left_out() -> None:
    """Power that settles within a second does not show in the result."""
    gpu, meter = rig()
    start_s = gpu.clock.now()
    load = VirtualLoad(gpu, LATENCY_S, lambda t: POWER_W + 60 * math.exp(-(t - start_s) / 0.15))
    result = measure(load, meter, PLAN)
    assert result.energy_j == pytest.approx(TRUTH_J, rel=0.01)
    cold = measure(
        VirtualLoad(gpu, LATENCY_S, _decay(gpu, 60, 0.15)),
        meter,
        dataclasses.replace(PLAN, warmup_s=0.0, min_windows=1, max_windows=1),
    )
    assert cold.energy_j > 1.01 * TRUTH_J


def _decay(gpu: VirtualGpu, extra_w: float, tau_s: float) -> Callable[[float], float]:
    start_s = gpu.clock.now()
    return lambda t: POWER_W + extra_w * math.exp(-(t - start_s) / tau_s)


def test_power_that_never_settles_is_named() -> None:
    gpu, meter = rig()
    load = VirtualLoad(gpu, LATENCY_S, lambda t: 100 + 60 * t)
    result = measure(load, meter, dataclasses.replace(PLAN, max_windows=3))
    assert "not steady" in result.quality


# ---- budget and windows that are too short ------------------------------------------------------


def test_a_budget_below_one_update_is_refused_with_the_length_needed() -> None:
    gpu, meter = rig()
    plan = dataclasses.replace(PLAN, warmup_s=0.0, window_s=0.01, budget_s=0.05)
    with pytest.raises(MeasurementTooShort, match=r"updates every 0\.(1|09)") as caught:
        measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
    assert caught.value.needed_s >= 0.2
    enough = dataclasses.replace(
        plan, window_s=caught.value.needed_s, budget_s=4 * caught.value.needed_s
    )
    assert measure(gpu.load(LATENCY_S, POWER_W), meter, enough).energy_j > 0


@pytest.mark.parametrize("field", [None, "instant"])
def test_a_window_below_one_update_grows(field: str | None) -> None:
    gpu, meter = rig(field=field)
    plan = dataclasses.replace(PLAN, window_s=0.001)
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
    assert result.window_s / result.windows >= 0.09
    assert result.energy_j == pytest.approx(TRUTH_J, rel=0.05)


def test_a_launch_longer_than_the_budget_is_refused() -> None:
    gpu, meter = rig()
    with pytest.raises(MeasurementTooShort, match="budget ended") as caught:
        measure(gpu.load(9.0, POWER_W), meter, PLAN)
    assert caught.value.needed_s > 9


@pytest.mark.parametrize("budget_s", [0.8, 1.2, 2.0, 3.0, 6.0])
def test_the_budget_is_kept(budget_s: float) -> None:
    gpu, meter = rig()
    plan = dataclasses.replace(PLAN, budget_s=budget_s, target_relative_stderr=1e-6, max_windows=99)
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
    assert result.device_s <= budget_s + 0.2
    assert ("budget allowed" in result.quality) == (result.windows < plan.min_windows)


# ---- sensors that fail --------------------------------------------------------------------------


def counter(gpu: VirtualGpu, **changes: float) -> Callable[[float], float]:
    """A counter of the true energy, updated every 100 ms."""

    def energy_j(time_s: float) -> float:
        at_s = math.floor(time_s * 10) / 10
        stuck_s = changes.get("stuck_s", math.inf)
        joules = 500 + changes.get("gain", 1.0) * gpu.timeline.cumulative_j(min(at_s, stuck_s))
        if at_s >= changes.get("reset_s", math.inf):
            joules -= 500 + gpu.timeline.cumulative_j(changes["reset_s"])
        return joules

    return energy_j


@pytest.mark.parametrize("reset_s", [0.2, 0.7, 1.0, 1.5])
def test_a_window_with_a_counter_reset_is_repeated(reset_s: float) -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(gpu.clock, energy_j=counter(gpu, reset_s=reset_s))
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    assert result.energy_j == pytest.approx(TRUTH_J, rel=0.01)
    assert "reset" in result.quality
    assert result.windows >= 2


def test_a_counter_that_keeps_resetting_is_an_error() -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(gpu.clock, energy_j=lambda t: math.floor(t * 10) % 4 + 1.0)
    with pytest.raises(MeasurementError, match="went backwards"):
        measure(gpu.load(LATENCY_S, 10.0), meter, PLAN)


def test_a_stuck_counter_is_an_error() -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(gpu.clock, energy_j=counter(gpu, stuck_s=1.3))
    with pytest.raises(MeasurementError, match="stuck") as caught:
        measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    assert not isinstance(caught.value, MeasurementTooShort)


def test_a_stuck_power_sensor_is_an_error() -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(gpu.clock, power_w=lambda _: 123.0)
    with pytest.raises(MeasurementError, match="stuck"):
        measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 700.0])
def test_an_implausible_power_is_an_error(value: float) -> None:
    gpu = VirtualGpu()
    noise = itertools.cycle([0.0, 0.001, 0.002])
    meter = ScriptedMeter(gpu.clock, power_w=lambda t: value if t > 1.2 else POWER_W + next(noise))
    with pytest.raises(MeasurementError, match=r"plausible|no energy or power"):
        measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)


def test_an_implausible_counter_is_an_error() -> None:
    gpu = VirtualGpu()
    meter = ScriptedMeter(gpu.clock, energy_j=counter(gpu, gain=3.0))
    with pytest.raises(MeasurementError, match=r"63\d.* W is not plausible"):
        measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)


def test_a_sensor_that_is_gone_is_no_error_of_one_kernel() -> None:
    gpu = VirtualGpu()

    class Gone(ScriptedMeter):
        def read(self):  # type: ignore[no-untyped-def]
            if self.time.now() > 1.0:
                raise MeterUnavailable("the GPU fell off the bus")
            return super().read()

    meter = Gone(gpu.clock, energy_j=counter(gpu))
    loads = [gpu.load(LATENCY_S, POWER_W), gpu.load(2 * LATENCY_S, POWER_W)]
    with pytest.raises(MeterUnavailable, match="fell off"):
        measure_interleaved(loads, meter, PLAN)


# ---- kernels that fail --------------------------------------------------------------------------


class Crashing(VirtualLoad):
    def enqueue(self, launches: int) -> None:
        if self.launches > 30_000:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        super().enqueue(launches)


def test_a_crashing_kernel_is_a_measurement_error_with_its_cause() -> None:
    gpu, meter = rig()
    with pytest.raises(MeasurementError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        measure(Crashing(gpu, LATENCY_S, lambda _: POWER_W), meter, PLAN)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_one_crashing_kernel_does_not_cost_the_others() -> None:
    gpu, meter = rig()
    loads: list[Load] = [
        gpu.load(LATENCY_S, POWER_W),
        Crashing(gpu, LATENCY_S, lambda _: POWER_W),
        gpu.load(2 * LATENCY_S, 150.0),
    ]
    first, crashed, last = measure_interleaved(loads, meter, PLAN)
    assert isinstance(crashed, MeasurementError)
    assert measured(first).energy_j == pytest.approx(TRUTH_J, rel=0.01)
    assert measured(last).energy_j == pytest.approx(2 * LATENCY_S * 150.0, rel=0.01)


# ---- interleaving, state, idle power ------------------------------------------------------------


@pytest.mark.parametrize("field", [None, "instant", "usage"])
def test_interleaved_kernels_do_not_leak_into_each_other(field: str | None) -> None:
    gpu, meter = rig(dataclasses.replace(ADA_SENSOR, gain=1.0, offset_w=0.0), field)
    truths = [(20e-6 * (1 + i), 90.0 + 55 * i) for i in range(5)]
    results = measure_interleaved([gpu.load(*truth) for truth in truths], meter, FINALIST_PLAN)
    for (latency_s, power_w), result in zip(truths, map(measured, results), strict=True):
        assert result.energy_j == pytest.approx(latency_s * power_w, rel=0.004)
        assert result.windows >= FINALIST_PLAN.min_windows


def test_interleaving_cancels_drift() -> None:
    """Two equal kernels on a card that slowly warms up: 0.4 % more power each second."""

    def drifting(t: float) -> float:
        return 200.0 * (1 + 0.004 * t)

    gpu, meter = rig()
    results = measure_interleaved(
        [VirtualLoad(gpu, LATENCY_S, drifting) for _ in range(2)], meter, FINALIST_PLAN
    )
    first, second = (measured(result).energy_j for result in results)
    interleaved = abs(second / first - 1)
    gpu, meter = rig()
    first, second = (
        measure(VirtualLoad(gpu, LATENCY_S, drifting), meter, FINALIST_PLAN).energy_j
        for _ in range(2)
    )
    one_after_the_other = abs(second / first - 1)
    print(
        f"difference interleaved {interleaved:.2%}, one after the other {one_after_the_other:.2%}"
    )
    assert interleaved < 0.5 * one_after_the_other


def test_no_kernels_give_no_results() -> None:
    _, meter = rig()
    assert measure_interleaved([], meter, PLAN) == []


class HostBoundLoad(VirtualLoad):
    """The host needs `delay_s` before each chunk; the device's own clock tells."""

    def __init__(self, gpu: VirtualGpu, latency_s: float, power_w: float, delay_s: float) -> None:
        super().__init__(gpu, latency_s, lambda _: power_w)
        self.delay_s = delay_s
        self._queued_s = 0.0
        self._ran_s = 0.0

    def enqueue(self, launches: int) -> None:
        start_s = max(self.gpu.clock.now(), self.gpu.timeline.end_s) + self.delay_s
        self.gpu.timeline.append(start_s, launches * self.latency_s, self.power_w(start_s))
        self._queued_s += launches * self.latency_s

    def synchronize(self) -> None:
        super().synchronize()
        if self._queued_s:
            self._ran_s, self._queued_s = self._queued_s, 0.0

    def device_seconds(self) -> float | None:
        return self._ran_s


@pytest.mark.parametrize("delay_s", [1e-4, 2e-3, 8e-3])
def test_launches_are_counted_on_device_time(delay_s: float) -> None:
    """What the host needs between two chunks is neither latency nor, but for the idle power, energy."""
    gpu, meter = rig()
    load = HostBoundLoad(gpu, LATENCY_S, POWER_W, delay_s)
    result = measure(load, meter, PLAN)
    share = delay_s / PLAN.chunk_s
    assert result.latency_s == pytest.approx(LATENCY_S, rel=2e-3)
    assert result.idle_share == pytest.approx(share, rel=0.1)
    assert abs(result.energy_j - TRUTH_J) < 2 * result.stderr_j
    assert result.energy_j == pytest.approx(TRUTH_J, rel=0.003 + 0.5 * share)
    assert ("waited for the host" in result.quality) == (share > 0.05)
    without_clock = measure(VirtualLoad(gpu, LATENCY_S, lambda _: POWER_W), meter, PLAN)
    assert without_clock.idle_share is None


def test_a_window_without_a_launch_is_an_error() -> None:
    """The host was away for two seconds before each chunk."""
    gpu, meter = rig()
    load = HostBoundLoad(gpu, LATENCY_S, POWER_W, 2.0)
    plan = dataclasses.replace(PLAN, warmup_s=0.0, budget_s=60.0)
    with pytest.raises(MeasurementError, match="waited for the host all through a window"):
        measure(load, meter, plan)


def test_energy_below_one_step_of_the_counter_is_never_zero() -> None:
    """A counter of 60 J steps: the window grows to several steps, or is refused with its length."""
    gpu = VirtualGpu()

    def coarse(t: float) -> float:
        return math.floor(gpu.timeline.cumulative_j(math.floor(t * 10) / 10) / 60) * 60.0

    meter = ScriptedMeter(gpu.clock, energy_j=coarse)
    meter.info = dataclasses.replace(meter.info, resolution_j=60.0)
    load = gpu.load(LATENCY_S, 80.0)
    with pytest.raises(MeasurementTooShort) as caught:
        measure(load, meter, dataclasses.replace(PLAN, warmup_s=0.0, budget_s=0.6))
    assert 0.75 < caught.value.needed_s < 10
    result = measure(load, meter, dataclasses.replace(PLAN, budget_s=20.0))
    assert result.energy_j > 0
    assert abs(result.energy_j - LATENCY_S * 80.0) < 2 * result.stderr_j
    assert result.window_s / result.windows > 0.65  # one step takes 0.75 s


def test_a_clock_that_moves_is_named() -> None:
    gpu, meter = rig()
    gpu.nvml._state = lambda: SimulatedState(
        clock_mhz=1410 - 60 * gpu.clock.now(), temperature_c=50 + 4 * gpu.clock.now()
    )
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    assert result.clock_before_mhz is not None
    assert result.clock_after_mhz is not None
    assert result.temperature_before_c is not None
    assert result.temperature_c is not None
    assert result.clock_before_mhz > result.clock_after_mhz
    assert result.temperature_before_c < result.temperature_c
    assert "the clock moved from" in result.quality


def test_the_interval_is_two_standard_errors_wide() -> None:
    gpu, meter = rig()
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    low_j, high_j = result.interval_j
    assert low_j < result.energy_j < high_j
    assert high_j - low_j == pytest.approx(4 * result.stderr_j)


def test_the_state_is_that_under_load() -> None:
    gpu, meter = rig()
    load = gpu.load(LATENCY_S, POWER_W)

    def state() -> SimulatedState:
        busy = gpu.clock.now() < gpu.timeline.end_s
        return SimulatedState(
            clock_mhz=1380 if busy else 210, temperature_c=60, throttle_bits=0x44 if busy else 1
        )

    gpu.nvml._state = state
    result = measure(load, meter, PLAN)
    assert result.clock_mhz == 1380
    assert result.temperature_c == 60
    assert result.throttle_reasons == ("hw_thermal_slowdown", "sw_power_cap")
    assert "throttled" in result.quality


@pytest.mark.parametrize("field", [None, "instant"])
def test_idle_power(field: str | None) -> None:
    _, meter = rig(field=field)
    assert measure_idle_power(meter, 2.0) == pytest.approx(50.0, rel=0.02)


def test_idle_power_needs_a_time() -> None:
    _, meter = rig()
    with pytest.raises(ValueError, match="positive"):
        measure_idle_power(meter, 0.0)


def test_net_of_idle() -> None:
    gpu, meter = rig()
    load = gpu.load(LATENCY_S, POWER_W)
    plan = dataclasses.replace(PLAN, net_of_idle=True)
    result = measure(load, meter, plan)
    assert result.energy_j == pytest.approx(LATENCY_S * (POWER_W - 50), rel=0.01)
    assert result.idle_power_w == pytest.approx(50.0, rel=0.02)
    given = measure(load, meter, plan, idle_power_w=60.0)
    assert given.energy_j == pytest.approx(LATENCY_S * (POWER_W - 60), rel=0.01)
    with pytest.raises(MeasurementError, match="net_of_idle=False"):
        measure(load, meter, plan, idle_power_w=300.0)
    assert measure(load, meter, PLAN).idle_power_w is None


def test_a_result_survives_json() -> None:
    gpu, meter = rig()
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    assert EnergyMeasurement.from_json(result.to_json()) == result


def test_same_seed_same_result() -> None:
    def once() -> EnergyMeasurement:
        gpu, meter = rig(seed=7)
        return measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)

    assert once() == once()


def test_the_fakes_are_meters() -> None:
    gpu = VirtualGpu()
    meters: list[PowerMeter] = [ScriptedMeter(gpu.clock, power_w=lambda t: t), rig()[1]]
    loads: list[Load] = [gpu.load(1.0, 1.0), BlockingLoad(gpu, 1.0, lambda _: 1.0)]
    assert len(meters) == len(loads)


# ---- racing -------------------------------------------------------------------------------------


def test_a_race_ends_early_only_when_it_is_clear() -> None:
    noisy = dataclasses.replace(TRUE_SENSOR, noise_w=5.0)

    def race(rival: float | None) -> EnergyMeasurement:
        gpu, meter = rig(noisy)
        plan = dataclasses.replace(PLAN, rival_j=None if rival is None else rival * TRUTH_J)
        return measure(gpu.load(LATENCY_S, POWER_W), meter, plan)

    alone = race(None)
    for rival in (0.5, 2.0):
        clear = race(rival)
        assert clear.windows == 2
        assert clear.device_s < alone.device_s
        assert clear.energy_j == pytest.approx(TRUTH_J, rel=0.15)
    assert race(1.0).windows == alone.windows > 2


def test_the_rival_is_no_part_of_how_a_run_measures() -> None:
    racing = dataclasses.replace(PLAN, rival_j=1.0, scatter=WindowScatter(1e-4, 9))
    assert racing.to_json() == PLAN.to_json()
    assert "window_s" in PLAN.to_json()


def test_a_race_is_content_with_less() -> None:
    race = MeasurementPlan().race(None)
    assert not race.enough(1, 1.0, 0.0)
    assert race.enough(2, 1.0, 0.02)
    assert not race.enough(2, 1.0, 0.021)
    assert MeasurementPlan().race(0.9).enough(2, 1.0, 0.03)
    assert not MeasurementPlan().race(0.95).enough(2, 1.0, 0.03)
    coarser = MeasurementPlan(min_windows=1, target_relative_stderr=0.1).race(None)
    assert (coarser.min_windows, coarser.target_relative_stderr) == (1, 0.1)


def test_scatter_is_pooled_over_kernels() -> None:
    """By hand: windows of 99 and 101 J scatter by sqrt(2) %, of 98, 100 and 102 J by 2 %."""
    pooled = WindowScatter(2e-4, 1) + WindowScatter(2 * 4e-4, 2)
    assert pooled == WindowScatter(1e-3, 3)
    # Student's t of 3 degrees of freedom is 3.182; twice the value covers 95 %.
    assert pooled.of_one_window() == pytest.approx(0.5 * 3.182 * math.sqrt(1e-3 / 3))
    many = WindowScatter(4e-4 * 10_000, 10_000)
    assert many.of_one_window() == pytest.approx(0.02 * 0.98, rel=1e-3)
    assert NO_SCATTER.of_one_window() == 0.0
    assert [WindowScatter(1e-4, freedom).known for freedom in (0, 4, 5)] == [False, False, True]


def test_a_measurement_tells_how_its_windows_scatter() -> None:
    gpu, meter = rig(dataclasses.replace(TRUE_SENSOR, noise_w=5.0))
    plan = dataclasses.replace(PLAN, min_windows=8, max_windows=8)
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
    assert result.window_scatter is not None
    assert result.scatter.freedom == 7
    assert result.scatter.squares == pytest.approx(7 * result.window_scatter**2)
    # All of the standard error comes from it here, scaled for 7 degrees of freedom.
    expected = 0.5 * 2.365 * result.window_scatter / math.sqrt(8)
    assert result.relative_stderr == pytest.approx(expected, rel=0.05)
    one = measure(
        gpu.load(LATENCY_S, POWER_W), meter, dataclasses.replace(plan, max_windows=1, min_windows=1)
    )
    assert (one.window_scatter, one.scatter) == (None, NO_SCATTER)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_a_scatter_that_cannot_be_is_refused(value: float) -> None:
    gpu, meter = rig()
    good = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN).to_json()
    assert EnergyMeasurement.from_json(good).to_json() == good
    with pytest.raises(ValueError, match="window_scatter"):
        EnergyMeasurement.from_json({**good, "window_scatter": value})


def test_one_window_is_enough_for_a_race_once_the_scatter_is_known() -> None:
    noisy = dataclasses.replace(TRUE_SENSOR, noise_w=2.0)

    def race(
        scatter: WindowScatter, rival: float | None = None, seed: int = 0
    ) -> EnergyMeasurement:
        gpu, meter = rig(noisy, seed=seed)
        return measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN.race(rival, scatter))

    told = NO_SCATTER
    for seed in range(5):
        told += race(NO_SCATTER, seed=seed).scatter
    assert told.known
    first = race(NO_SCATTER)
    one = race(told)
    assert first.windows >= 2
    assert one.windows == 1
    assert one.device_s < first.device_s - 0.9 * PLAN.window_s
    # Its standard error is what the others told, and it holds: two of it cover 95 %.
    assert one.relative_stderr == pytest.approx(told.of_one_window(), rel=0.2)
    errors = [race(told, seed=seed) for seed in range(40)]
    held = sum(abs(e.energy_j - TRUTH_J) < 2 * e.stderr_j for e in errors)
    assert held >= 34
    # Windows that scatter by 5 %: one does not tell this kernel from a rival that is 2 % off.
    assert race(WindowScatter(10 * 0.05**2, 10), 1.02 * TRUTH_J).windows > 1
    assert race(WindowScatter(10 * 0.05**2, 10), 1.5 * TRUTH_J).windows == 1
