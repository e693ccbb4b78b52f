"""A test suite that any meter must pass.

Subclass it, and pytest runs it against yours::

    from tvm_energy.testing import MeterContract, PausingLoad

    class TestPdu(MeterContract):
        expected_power_w = 230.0            # optional: what the device draws under the load

        def open_meter(self):
            return PduMeter(...)

        def make_load(self, meter):         # optional: what keeps the device busy
            return PausingLoad(meter.time, latency_s=2e-3)

Meters of this package pass it, too: NVML on a stand-in library, RAPL on a folder like powercap's, Zeus on a
fake, and simulated GPUs. `tvm_energy.meters.base` says what a meter is.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from tvm_energy.errors import TvmEnergyError
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meters.base import DeviceState, Load, MeterInfo, PowerMeter, Reading, TimeSource
from tvm_energy.meters.window import IMPLAUSIBLE, BusyDevice
from tvm_energy.protocol import calibrate, measure

__all__ = ["MeterContract", "PausingLoad"]

_METHODS = ("counter", "power_integral", "power_average")

#: Updates of the sensor that are watched, and readings in the time of one.
_UPDATES = 12
_READINGS = 20
_CHUNK_S = 0.02
_CALIBRATION_S = 10.0


class PausingLoad:
    """Launches that take their time and do nothing: for a device that is kept busy otherwise.

    Args:
        time: clock of the meter.
        latency_s: seconds a launch.
    """

    def __init__(self, time: TimeSource, latency_s: float = 1e-3) -> None:
        self._time = time
        self._latency_s = latency_s
        self._until_s = time.now()

    def enqueue(self, launches: int) -> None:
        """See `tvm_energy.meters.base.Load.enqueue`."""
        start_s = max(self._time.now(), self._until_s)
        self._until_s = start_s + launches * self._latency_s

    def synchronize(self) -> None:
        """See `tvm_energy.meters.base.Load.synchronize`."""
        self._time.sleep(max(0.0, self._until_s - self._time.now()))


class MeterContract:
    """Subclass it as ``Test...`` and say how your meter is opened.

    Attributes:
        expected_power_w: what the device truly draws under the load; None leaves it open.
        tolerance: relative error that is allowed where the power is known.
        plan: how the kernel is measured; long enough for a slow sensor.
    """

    expected_power_w: float | None = None
    tolerance: float = 0.02
    plan: MeasurementPlan = MeasurementPlan()

    # ---- for you to fill in

    def open_meter(self) -> PowerMeter:
        """A new meter; it is closed after each test."""
        raise NotImplementedError("say how your meter is opened")

    def make_load(self, meter: PowerMeter) -> Load:
        """What keeps the device busy; the default does nothing for a millisecond a launch."""
        return PausingLoad(meter.time)

    def break_sensor(self, meter: PowerMeter) -> bool:
        """Make every further reading of this meter fail; False where you cannot."""
        return False

    # ---- what is tested

    def test_it_says_what_it_is(self) -> None:
        """Identity, method, scope and update period are there and go into a log header."""
        with self._opened() as meter:
            info = meter.info
            assert isinstance(info, MeterInfo)
            for name in ("meter", "scope", "device_name", "device_uuid"):
                assert isinstance(getattr(info, name), str), name
                assert getattr(info, name), f"{name} is empty"
            assert info.method in _METHODS, f"{info.method!r} is none of {', '.join(_METHODS)}"
            assert math.isfinite(info.update_period_s)
            assert info.update_period_s > 0
            if info.method == "counter":
                assert info.resolution_j is not None, "the step of a counter belongs to its error"
                assert info.resolution_j > 0
            if info.max_power_w is not None:
                assert info.max_power_w > 0
            assert all(isinstance(note, str) and note for note in info.notes)
            assert json.loads(json.dumps(info.to_json()))["method"] == info.method

    def test_readings_carry_the_time_of_the_meters_clock(self) -> None:
        """Each is stamped between the moments before and after the call."""
        with self._opened() as meter:
            last_s = -math.inf
            for _ in range(20):
                before_s = meter.time.now()
                reading = meter.read()
                after_s = meter.time.now()
                assert before_s <= reading.time_s <= after_s, (before_s, reading.time_s, after_s)
                assert reading.time_s >= last_s, "time runs backwards"
                last_s = reading.time_s
                meter.time.sleep(meter.info.update_period_s / _READINGS)

    def test_a_reading_holds_what_the_method_says(self) -> None:
        """A counter gives joules and no watts, a power sensor the reverse; never nothing."""
        with self._opened() as meter:
            reading = meter.read()
            if meter.info.method == "counter":
                value, other = reading.energy_j, reading.power_w
            else:
                value, other = reading.power_w, reading.energy_j
            assert value is not None, "a sensor that cannot be read raises; it does not give None"
            assert other is None
            assert math.isfinite(value)
            assert value >= 0

    def test_the_sensor_moves_under_load(self) -> None:
        """A counter only upwards."""
        with self._opened() as meter:
            values = [_value(reading) for reading in self._watch(meter)]
            assert len(set(values)) > 2, f"the sensor stands still at {values[0]}"
            if meter.info.method == "counter":
                falls = [pair for pair in pairwise(values) if pair[1] < pair[0]]
                assert not falls, f"the counter went backwards: {falls[:3]}"

    def test_the_update_period_is_the_true_one(self) -> None:
        """Within a third: a window that is aligned to the wrong period is not aligned."""
        with self._opened() as meter:
            readings = self._watch(meter)
            changes_s = [
                later.time_s
                for earlier, later in pairwise(readings)
                if _value(later) != _value(earlier)
            ]
            assert len(changes_s) > 2, "the sensor hardly ever changes"
            seen_s = median(later - earlier for earlier, later in pairwise(changes_s))
            stated_s = meter.info.update_period_s
            slack_s = stated_s / 3 + 2 * median(
                later.time_s - earlier.time_s for earlier, later in pairwise(readings)
            )
            assert abs(seen_s - stated_s) <= slack_s, f"{stated_s} s stated, {seen_s} s seen"

    def test_power_is_plausible(self) -> None:
        """Above zero and below the limit of the device, and the expected one where that is known."""
        with self._opened() as meter:
            power_w = _mean_power_w(self._watch(meter))
            assert power_w > 0
            if meter.info.max_power_w is not None:
                assert power_w <= IMPLAUSIBLE * meter.info.max_power_w

    def test_the_state_is_known_or_none(self) -> None:
        """Clock and temperature are physical, or None; zero stands for nothing."""
        with self._opened() as meter:
            state = meter.state()
            assert isinstance(state, DeviceState)
            if state.clock_mhz is not None:
                assert 1 < state.clock_mhz < 1e5
            if state.temperature_c is not None:
                assert -50 < state.temperature_c < 150
            assert all(isinstance(reason, str) for reason in state.throttle_reasons)

    def test_a_kernel_is_measured(self) -> None:
        """The whole protocol: a positive energy with an error bar, named method and scope."""
        with self._opened() as meter:
            result = measure(self.make_load(meter), meter, self.plan)
            assert result.energy_j > 0
            assert 0 < result.stderr_j < 0.5 * result.energy_j
            assert result.sensor_updates >= result.windows >= 1
            assert (result.meter, result.method, result.scope) == (
                meter.info.meter,
                meter.info.method,
                meter.info.scope,
            )
            assert EnergyMeasurement.from_json(json.loads(json.dumps(result.to_json()))) == result
            if self.expected_power_w is not None:
                error = abs(result.power_w / self.expected_power_w - 1)
                assert error <= self.tolerance, (
                    f"{result.power_w:.4g} W measured, {self.expected_power_w:.4g} W expected"
                )

    def test_a_broken_sensor_raises(self) -> None:
        """An error of ours that says why, not a number and not a foreign exception."""
        with self._opened() as meter:
            if not self.break_sensor(meter):
                import pytest

                pytest.skip("break_sensor is not filled in")
            try:
                given: object = meter.read()
            except TvmEnergyError as exc:
                given = exc
            assert isinstance(given, TvmEnergyError), f"a broken sensor gave {given}"
            assert len(str(given)) > 20, f"{given}: say what failed, and what to do"

    def test_it_can_be_closed_twice_and_opened_again(self) -> None:
        """Closing is final for this meter and harmless for the next."""
        meter = self.open_meter()
        meter.close()
        meter.close()
        with self._opened() as again:
            assert again.read().time_s >= 0

    # ---- helpers

    @contextlib.contextmanager
    def _opened(self) -> Iterator[PowerMeter]:
        meter = self.open_meter()
        try:
            yield meter
        finally:
            meter.close()

    def _watch(self, meter: PowerMeter) -> list[Reading]:
        """Readings under load, many in each update of the sensor."""
        period_s = meter.info.update_period_s
        load = self.make_load(meter)
        latency_s = calibrate(load, meter, _CHUNK_S, meter.time.now() + _CALIBRATION_S)
        busy = BusyDevice(load, meter, latency_s, _CHUNK_S, random.Random(0))
        readings = [busy.read(0.0)]
        # A processor blocks until a chunk is done, so a reading can come with each chunk only.
        enough_s = _UPDATES * max(period_s, _CHUNK_S)
        while readings[-1].time_s - readings[0].time_s < enough_s:
            readings.append(busy.read(period_s / _READINGS))
        busy.finish_chunk()
        return readings


def _value(reading: Reading) -> float:
    value = reading.energy_j if reading.power_w is None else reading.power_w
    assert value is not None
    return value


def _mean_power_w(readings: list[Reading]) -> float:
    first, last = readings[0], readings[-1]
    if first.energy_j is None or last.energy_j is None:
        return sum(_value(reading) for reading in readings) / len(readings)
    return (last.energy_j - first.energy_j) / (last.time_s - first.time_s)
