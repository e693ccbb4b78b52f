"""Energy over a stretch of time, on a simulated card whose truth is known."""

from __future__ import annotations

import dataclasses

import pytest
from virtual_gpu import TRUE_SENSOR, ScriptedMeter, VirtualGpu

from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.simulation.timeline import VirtualClock
from tvm_energy.stretch import DeviceEnergy, StretchRecorder


def run(
    gpu: VirtualGpu, seconds: float, power_w: float, idle_s: float = 3.0, **which
) -> DeviceEnergy:
    """A command that draws that power for that long, between idle times."""
    recorder = StretchRecorder([open_nvml_meter(nvml=gpu.nvml, **which)])
    if idle_s:
        recorder.measure_idle(idle_s)
    start_s = recorder.begin()
    gpu.timeline.append(start_s, seconds, power_w)

    def wait(at_most_s: float) -> bool:
        left_s = start_s + seconds - gpu.clock.now()
        gpu.clock.sleep(max(0.0, min(at_most_s, left_s)))
        return left_s <= at_most_s

    (result,) = recorder.finish(start_s, recorder.follow(wait))
    return result


@pytest.mark.parametrize("field", ["counter", "instant"])
def test_gross_and_net_energy_of_a_command(field: str) -> None:
    result = run(VirtualGpu(), 10.0, 200.0, field=field)
    assert result.energy_j == pytest.approx(2000, rel=0.01)
    assert result.net_energy_j == pytest.approx(1500, rel=0.015)
    assert result.idle_power_w == pytest.approx(50, abs=0.5)
    assert result.mean_power_w == pytest.approx(200, rel=0.01)
    assert result.seconds == pytest.approx(10.0, abs=0.01)
    assert result.sensor_updates >= 90
    assert result.quality == "good"
    assert result.simulated


@pytest.mark.parametrize("field", ["counter", "instant"])
def test_the_error_bar_covers_the_truth(field: str) -> None:
    inside = 0
    for seed in range(40):
        gpu = VirtualGpu(seed=seed)
        seconds = 2.0 + 0.173 * seed
        result = run(gpu, seconds, 250.0, idle_s=0.0, field=field)
        assert result.energy_j is not None
        assert result.stderr_j is not None
        assert result.stderr_j < 0.06 * result.energy_j
        inside += abs(result.energy_j - 250.0 * seconds) <= 2 * result.stderr_j
    assert inside >= 36


def test_without_idle_there_is_no_net_energy() -> None:
    result = run(VirtualGpu(), 5.0, 200.0, idle_s=0.0)
    assert result.energy_j == pytest.approx(1000, rel=0.02)
    assert (result.idle_power_w, result.net_energy_j, result.net_stderr_j) == (None, None, None)


def test_too_short_a_command_is_never_zero() -> None:
    result = run(VirtualGpu(), 0.05, 200.0)
    assert result.energy_j is None
    assert result.net_energy_j is None
    assert (
        "too short for a sensor that updates every 0.0998 s; measure 0.399 s or more"
        in result.quality
    )


def scripted(**functions) -> tuple[VirtualClock, ScriptedMeter]:
    clock = VirtualClock()
    return clock, ScriptedMeter(clock, **functions)


def follow(clock: VirtualClock, meter: ScriptedMeter, seconds: float) -> DeviceEnergy:
    recorder = StretchRecorder([meter])
    start_s = recorder.begin()

    def wait(at_most_s: float) -> bool:
        clock.sleep(at_most_s)
        return clock.now() - start_s >= seconds

    (result,) = recorder.finish(start_s, recorder.follow(wait))
    return result


def ticks(time_s: float) -> float:
    return int(time_s * 10) / 10


def test_a_stuck_counter_is_said_and_not_zero() -> None:
    clock, meter = scripted(energy_j=lambda t: 100.0)
    result = follow(clock, meter, 20.0)
    assert result.energy_j is None
    assert "stuck" in result.quality


def test_a_counter_reset_is_bridged_and_said() -> None:
    clock, meter = scripted(energy_j=lambda t: 100 * ticks(t) + (500 if t < 5 else -400))
    result = follow(clock, meter, 10.0)
    assert result.energy_j == pytest.approx(1000, rel=0.12)  # what came with the reset is lost
    assert "reset" in result.quality


def test_power_beyond_the_limit_is_refused() -> None:
    clock, meter = scripted(energy_j=lambda t: 5000 * ticks(t))
    result = follow(clock, meter, 5.0)
    assert result.energy_j is None
    assert "not plausible" in result.quality


def test_a_sensor_that_fails_leaves_the_others() -> None:
    clock = VirtualClock()
    good = ScriptedMeter(clock, energy_j=lambda t: 100 * ticks(t))

    def lost(time_s: float) -> float:
        if time_s > 2:
            raise RuntimeError("fell off the bus")
        return 50 * ticks(time_s)

    bad = ScriptedMeter(clock, energy_j=lost)
    recorder = StretchRecorder([bad, good])
    start_s = recorder.begin()

    def wait(at_most_s: float) -> bool:
        clock.sleep(at_most_s)
        return clock.now() >= 6

    first, second = recorder.finish(start_s, recorder.follow(wait))
    assert first.energy_j is None
    assert "fell off the bus" in first.quality
    assert second.energy_j == pytest.approx(100 * second.seconds, rel=0.03)


def test_idle_power_that_still_falls_is_doubtful() -> None:
    clock, meter = scripted(
        power_w=lambda t: 50 + 100 * 0.5 ** (ticks(t) / 2) + 0.01 * (int(t * 10) % 2)
    )
    recorder = StretchRecorder([meter])
    recorder.measure_idle(3.0)
    start_s = recorder.begin()
    end_s = recorder.follow(lambda s: clock.sleep(s) or clock.now() - start_s > 5)  # type: ignore[func-returns-value]
    (result,) = recorder.finish(start_s, end_s)
    assert "not steady before the start" in result.quality


def test_a_long_command() -> None:
    gpu = VirtualGpu(dataclasses.replace(TRUE_SENSOR, update_period_s=0.1))
    result = run(gpu, 600.0, 120.0)
    assert result.energy_j == pytest.approx(72_000, rel=0.001)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="at least one meter"):
        StretchRecorder([])
    _, meter = scripted(energy_j=lambda t: t)
    with pytest.raises(ValueError, match="seconds must be positive"):
        StretchRecorder([meter]).measure_idle(0)
