"""One window: the device kept busy with one kernel, the sensor read meanwhile.

::

    chunks     |████████|████████|████████|████████|     launches queued, about chunk_s each
    readings     ·    ·    ·    ·    · · · · · ·          while a chunk runs, never between chunks
    counter    ──────┐          ┌──────────────┐
                     └ update   └ update       └ update
                       opens                     closes  the window

A counter holds still between its updates, so the difference of two readings is wrong by up to one
update at each end. A window therefore opens and closes *on* an update: what is uncertain then is only
when the update came, between two readings that lie close together near the expected moment. The
launches done by that moment are interpolated linearly inside the running chunk, on the device's own
clock where the load has one. Windows do not share an update, so their errors are independent.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tvm_energy.errors import MeasurementError, MeasurementTooShort
from tvm_energy.meters.base import (
    DeviceState,
    Load,
    MeterInfo,
    PowerMeter,
    Reading,
    TimedLoad,
)

#: A reading above this many times the power limit is an error of the sensor.
IMPLAUSIBLE = 1.5

#: A sensor that shows the same value for so many update periods under load is stuck.
STUCK_PERIODS = 20

#: Averages of field 185 and of nvmlDeviceGetPowerUsage reach back so far (NVML API reference).
LONG_AVERAGE_S = 1.0

_POWER_STEP_W = 1e-3  # NVML gives whole milliwatts

#: Close readings: this part of the update period, and no closer than this many seconds.
_CLOSE_PART = 1 / 100
_CLOSE_AT_LEAST_S = 5e-4

#: Chunks differ in length by so much, lest their rhythm locks with that of the sensor.
_CHUNK_JITTER = 0.1


class CounterReset(MeasurementError):
    """The counter went backwards: the driver was reloaded. The window is lost, not the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one window gave.

    Attributes:
        energy_j: joules inside the window.
        sigma_j: standard error of ``energy_j`` that the sensor causes (edges, resolution, noise).
        seconds: length.
        launches: launches inside, a fraction of one at each edge included.
        busy_s: seconds inside with the kernel running, by the device's own clock; None where the
            load has no such clock.
        updates: updates of the sensor inside.
    """

    energy_j: float
    sigma_j: float
    seconds: float
    launches: float
    busy_s: float | None
    updates: int

    @property
    def idle_share(self) -> float:
        """Part of the window in which the device is known to have waited for the host."""
        return 0.0 if self.busy_s is None else max(0.0, 1 - self.busy_s / self.seconds)

    @property
    def latency_s(self) -> float:
        """Seconds a launch, without the time that the device waited for the host."""
        return (self.seconds if self.busy_s is None else self.busy_s) / self.launches

    @property
    def energy_a_launch_j(self) -> float:
        """Joules a launch.

        While the device waits between two chunks it draws something between nothing and what the
        kernel draws: half of that time counts, and `sigma_gaps_j` says how uncertain that is.
        """
        return self.energy_j * (1 - 0.5 * self.idle_share) / self.launches

    @property
    def sigma_gaps_j(self) -> float:
        """Standard error of `energy_a_launch_j` from those waits; more windows do not lessen it."""
        return self.energy_j * self.idle_share / math.sqrt(12) / self.launches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """An update of a counter: when (give or take ``uncertainty_s`` on each side) and its value."""

    time_s: float
    uncertainty_s: float
    energy_j: float


class BusyDevice:
    """Keeps one kernel running in chunks and reads the sensor while it does.

    Args:
        load: the kernel.
        meter: the sensor of the device that the kernel runs on.
        latency_s: seconds a launch, roughly; corrected with every chunk.
        chunk_s: length of a chunk.
        rng: varies the lengths of chunks, and the moments of readings, a little.
    """

    def __init__(
        self, load: Load, meter: PowerMeter, latency_s: float, chunk_s: float, rng: random.Random
    ) -> None:
        self.meter = meter
        self.latency_s = latency_s
        self._load = load
        self._device_seconds = load.device_seconds if isinstance(load, TimedLoad) else None
        self._chunk_s = chunk_s
        self._rng = rng
        self._running: tuple[float, int] | None = None  # start, launches
        self._running_until_s = -math.inf
        # Corners of launches over time: linear inside a chunk, level between chunks.
        self._times_s = [meter.time.now()]
        self._launches = [0]
        self._busy_s = [0.0]
        self._timed = False
        self._value: float | None = None
        self._changed_s = meter.time.now()

    def read(self, wait_s: float) -> Reading:
        """The next reading, ``wait_s`` from now, with the kernel running.

        Raises:
            CounterReset: the counter went backwards.
            MeasurementError: the value is not plausible, or has not changed for too long.
        """
        time = self.meter.time
        target_s = time.now() + wait_s
        while True:
            if self._running_until_s <= max(time.now(), target_s):
                self.finish_chunk()
                self._start_chunk()
            now_s = time.now()
            if now_s >= target_s:
                break
            time.sleep(max(0.0, min(target_s, self._running_until_s) - now_s))
        reading = self.meter.read()
        self._check(reading)
        return reading

    def dither(self) -> float:
        """A random factor from 0.5 to 1."""
        return self._rng.uniform(0.5, 1.0)

    def state(self) -> DeviceState:
        """Clock, temperature and throttle reasons with the kernel running."""
        if self._running is None:
            self._start_chunk()
        return self.meter.state()

    def finish_chunk(self) -> None:
        """Wait for the running chunk, and learn from it how long a launch takes."""
        if self._running is None:
            return
        start_s, launches = self._running
        self._running = None
        self._load.synchronize()
        end_s = self.meter.time.now()
        self._running_until_s = -math.inf
        self.latency_s = max(end_s - start_s, 1e-9) / launches
        device_s = None if self._device_seconds is None else self._device_seconds()
        if device_s is not None:
            self._timed = True
            # The end is noticed promptly; what the host needed came before the first launch.
            start_s = max(start_s, end_s - device_s)
        done, busy_s = self._launches[-1], self._busy_s[-1]
        self._times_s += [start_s, end_s]
        self._launches += [done, done + launches]
        self._busy_s += [busy_s, busy_s + (end_s - start_s)]

    def launches_between(self, start_s: float, end_s: float) -> float:
        """Launches done between two moments; chunks must be finished up to there."""
        return self._at(end_s, self._launches) - self._at(start_s, self._launches)

    def busy_between(self, start_s: float, end_s: float) -> float | None:
        """Seconds with the kernel running, by the device's own clock; None where there is none."""
        if not self._timed:
            return None
        return self._at(end_s, self._busy_s) - self._at(start_s, self._busy_s)

    def _at(self, time_s: float, values: Sequence[float]) -> float:
        right = bisect_right(self._times_s, time_s)
        if right >= len(self._times_s):
            return float(values[-1])
        if right == 0:
            return 0.0
        t0, t1 = self._times_s[right - 1], self._times_s[right]
        return values[right - 1] + (values[right] - values[right - 1]) * (time_s - t0) / (t1 - t0)

    def forget_value(self) -> None:
        """Start watching for changes anew (after a pause or a reset)."""
        self._value = None
        self._changed_s = self.meter.time.now()

    def _start_chunk(self) -> None:
        wanted_s = self._chunk_s * self._rng.uniform(1 - _CHUNK_JITTER, 1 + _CHUNK_JITTER)
        launches = max(1, round(wanted_s / self.latency_s))
        start_s = self.meter.time.now()
        self._load.enqueue(launches)
        self._running = (start_s, launches)
        # Rather late than early: a chunk that ended unnoticed leaves the device idle.
        self._running_until_s = start_s + 0.97 * launches * self.latency_s

    def _check(self, reading: Reading) -> None:
        info = self.meter.info
        value = reading.power_w if reading.energy_j is None else reading.energy_j
        if value is None or not math.isfinite(value) or value < 0:
            raise MeasurementError(
                f"{info.device_name}: the sensor gave {value!r}, which is no energy or power; "
                "measure again, and check the driver if it stays"
            )
        if reading.power_w is not None:
            check_power(reading.power_w, info)
        if reading.energy_j is not None and self._value is not None and value < self._value:
            self.forget_value()
            raise CounterReset(f"{info.device_name}: the energy counter went backwards")
        if value != self._value:
            self._value, self._changed_s = value, reading.time_s
        # Launches longer than that many updates are no reason: readings are taken while they run.
        elif reading.time_s - self._changed_s > max(STUCK_PERIODS * info.update_period_s, 1.0):
            raise MeasurementError(
                f"{info.device_name}: the sensor has shown {value:g} for "
                f"{reading.time_s - self._changed_s:.1f} s under load: it is stuck; reload the driver, "
                "or choose another sensor"
            )


def check_power(power_w: float, info: MeterInfo) -> None:
    """Refuse a power that the device cannot have.

    Raises:
        MeasurementError: not finite, not positive, or far above the power limit.
    """
    limit_w = math.inf if info.max_power_w is None else IMPLAUSIBLE * info.max_power_w
    if not 0 < power_w <= limit_w:
        raise MeasurementError(
            f"{info.device_name}: {power_w:.4g} W is not plausible (limit {info.max_power_w} W); "
            "measure again, and check the driver if it stays"
        )


def settle_s(info: MeterInfo) -> float:
    """How long the sensor still shows what ran before."""
    periods_s = 2.5 * info.update_period_s
    return periods_s + (LONG_AVERAGE_S if info.method == "power_average" else 0.0)


def measure_window(busy: BusyDevice, window_s: float, deadline_s: float) -> Window:
    """Measure one window of at least one update of the sensor.

    Args:
        busy: the running kernel.
        window_s: wanted length.
        deadline_s: moment on the meter's clock by which the window must be closed.

    Raises:
        MeasurementTooShort: the sensor did not move before the deadline.
        MeasurementError: see `BusyDevice.read`.
    """
    if busy.meter.info.method == "counter":
        return _counter_window(busy, window_s, deadline_s)
    return _power_window(busy, window_s, deadline_s)


def _counter_window(busy: BusyDevice, window_s: float, deadline_s: float) -> Window:
    info = busy.meter.info
    period_s = info.update_period_s
    close_s = max(_CLOSE_AT_LEAST_S, period_s * _CLOSE_PART)
    length_s = period_s * max(1, round(window_s / period_s))
    # The period is known to about 1 %, so the last update may come that much early.
    margin_s = max(4 * close_s, 0.01 * length_s)
    started_s = busy.meter.time.now()
    last = busy.read(0.0)
    opening = latest = None
    expected_s = last.time_s  # the first update: at any moment
    updates = 0
    while last.time_s < deadline_s:
        left_s = expected_s - margin_s - last.time_s
        near = left_s <= close_s
        # Gaps of random length: with equal ones, all windows would err to the same side.
        reading = busy.read(close_s * busy.dither() if near else min(0.5 * period_s, left_s))
        if reading.energy_j != last.energy_j:
            latest = _update_between(last, reading, info)
            if opening is None:
                opening, expected_s = latest, latest.time_s + length_s
            else:
                updates += 1
                if near and latest.time_s > expected_s - 0.5 * period_s:
                    break
                # One that came before the readings were close tells when to expect the next.
                expected_s = max(expected_s, latest.time_s + 0.5 * period_s)
        last = reading
    busy.finish_chunk()
    if opening is None or latest is None or updates == 0:
        raise _too_short(info, busy.meter.time.now() - started_s)
    return _between(busy, opening, latest, updates)


def _update_between(earlier: Reading, later: Reading, info: MeterInfo) -> _Update:
    """An update seen by ``later`` and not yet by ``earlier``; the newest, where there were several."""
    assert later.energy_j is not None
    gap_s = min(later.time_s - earlier.time_s, info.update_period_s)
    return _Update(
        time_s=later.time_s - 0.5 * gap_s, uncertainty_s=0.5 * gap_s, energy_j=later.energy_j
    )


def _between(busy: BusyDevice, opening: _Update, closing: _Update, updates: int) -> Window:
    seconds = closing.time_s - opening.time_s
    energy_j = closing.energy_j - opening.energy_j
    if not seconds > 0:
        raise _too_short(busy.meter.info, seconds)
    power_w = energy_j / seconds
    check_power(power_w, busy.meter.info)
    launches = _launches(busy, opening.time_s, closing.time_s)
    # Uniform within +-u has the standard deviation u / sqrt(3); likewise for half a counter step.
    edges_s2 = (opening.uncertainty_s**2 + closing.uncertainty_s**2) / 3
    steps_j2 = (busy.meter.info.resolution_j or 0.0) ** 2 / 6
    return Window(
        energy_j=energy_j,
        sigma_j=math.sqrt(power_w**2 * edges_s2 + steps_j2),
        seconds=seconds,
        launches=launches,
        busy_s=busy.busy_between(opening.time_s, closing.time_s),
        updates=updates,
    )


def _launches(busy: BusyDevice, start_s: float, end_s: float) -> float:
    launches = busy.launches_between(start_s, end_s)
    if not launches > 0:
        raise MeasurementError(
            f"{busy.meter.info.device_name}: the device waited for the host all through a window of "
            f"{end_s - start_s:.3g} s; measure again when this machine is less busy"
        )
    return launches


def _power_window(busy: BusyDevice, window_s: float, deadline_s: float) -> Window:
    info = busy.meter.info
    started_s = busy.meter.time.now()
    wait_s = 0.5 * info.update_period_s
    length_s = max(window_s, info.update_period_s)
    if info.method == "power_average":  # shorter windows would see the same average twice
        length_s = max(length_s, LONG_AVERAGE_S)
    readings = [busy.read(0.0)]
    values = [_watts(readings[0])]
    while readings[-1].time_s < readings[0].time_s + length_s or len(values) < 2:
        if readings[-1].time_s >= deadline_s:
            break
        readings.append(busy.read(wait_s))
        if _watts(readings[-1]) != values[-1]:
            values.append(_watts(readings[-1]))
    busy.finish_chunk()
    seconds = readings[-1].time_s - readings[0].time_s
    if len(values) < 2 or seconds < info.update_period_s:
        raise _too_short(info, busy.meter.time.now() - started_s)
    energy_j = integrate_j(readings)
    check_power(energy_j / seconds, info)
    return Window(
        energy_j=energy_j,
        sigma_j=seconds * _mean_sigma_w(values, seconds, info),
        seconds=seconds,
        launches=_launches(busy, readings[0].time_s, readings[-1].time_s),
        busy_s=busy.busy_between(readings[0].time_s, readings[-1].time_s),
        updates=len(values) - 1,
    )


def _watts(reading: Reading) -> float:
    assert reading.power_w is not None
    return reading.power_w


def integrate_j(readings: Sequence[Reading]) -> float:
    """Joules under the readings of a power sensor, by the trapezoid rule."""
    return sum(
        0.5 * (_watts(earlier) + _watts(later)) * (later.time_s - earlier.time_s)
        for earlier, later in pairwise(readings)
    )


def _mean_sigma_w(values: Sequence[float], seconds: float, info: MeterInfo) -> float:
    """Standard error of the mean power, from the updates seen in the window."""
    count = len(values)
    mean_w = sum(values) / count
    spread_w2 = sum((value - mean_w) ** 2 for value in values) / (count - 1)
    independent = float(count)
    if info.method == "power_average":  # neighbours share most of what they average
        independent = min(independent, max(1.0, seconds / LONG_AVERAGE_S))
    return math.sqrt(spread_w2 / independent + _POWER_STEP_W**2 / 12)


def _too_short(info: MeterInfo, waited_s: float) -> MeasurementTooShort:
    needed_s = max(3 * info.update_period_s, 2 * waited_s)
    return MeasurementTooShort(
        f"{info.device_name}: the sensor did not move in {max(waited_s, 0.0):.3g} s (it updates every "
        f"{info.update_period_s:.3g} s); allow a window of {needed_s:.3g} s or more, and a budget beyond the "
        "warm-up",
        needed_s,
    )
