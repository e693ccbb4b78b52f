"""The energy that devices use over a stretch of time, such as the run of a command.

::

    run                    ┌──────────────────────────────┐
                 idle      │start                      end│
    sensor   ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·     read all along
    counter  ──┐     ┌─────┐     ┌─────┐     ┌─────┐     ┌─────
               └ update    └ update                      └ the last update that is needed

Unlike a kernel (`tvm_energy.protocol`), a command runs once and may do anything meanwhile. The energy at
its start and at its end is interpolated between the updates of the counter around them, and the whole
energy of such an interval, spread evenly, is what may be wrong there. Power sensors are integrated
by the trapezoid rule. Idle power is that of the seconds before the start.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from tvm_energy.errors import MeasurementError, MeasurementTooShort
from tvm_energy.meters.base import MeterInfo, PowerMeter, Reading
from tvm_energy.meters.window import check_power, settle_s

__all__ = ["DeviceEnergy", "StretchRecorder"]

#: Faster polling of a sensor costs power and tells nothing more (zeus#284).
_POLL_PART = 0.25
_POLL_AT_LEAST_S, _POLL_AT_MOST_S = 0.02, 0.1

#: Idle power that still moves by this much between its two halves is doubtful.
_STEADY = 0.05
_STEADY_W = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """What one device used.

    Attributes:
        device_name, device_uuid, meter, method, scope, simulated: as in `MeterInfo`.
        seconds: length of the stretch.
        energy_j, stderr_j: joules, gross, and their standard error; None where they could not be
            measured, for the reason in ``quality``. Gain error of the sensor is not in it.
        idle_power_w: mean power before the start; None where it was not measured.
        net_energy_j, net_stderr_j: without idle power x time.
        mean_power_w: energy over seconds.
        sensor_updates: updates of the sensor inside.
        quality: ``good``, or a short reason for doubt.
        notes: what belongs to every measurement with this meter (other processes, MIG, ...).
    """

    device_name: str
    device_uuid: str
    meter: str
    method: str
    scope: str
    simulated: bool
    seconds: float
    energy_j: float | None
    stderr_j: float | None
    idle_power_w: float | None
    net_energy_j: float | None
    net_stderr_j: float | None
    mean_power_w: float | None
    sensor_updates: int
    quality: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "notes": list(self.notes)
        }


class StretchRecorder:
    """Reads several sensors all along.

    Args:
        meters: opened meters that share one clock.
    """

    def __init__(self, meters: Sequence[PowerMeter]) -> None:
        if not meters:
            raise ValueError("at least one meter is needed")
        self._time = meters[0].time
        self._traces = [_Trace(meter) for meter in meters]
        self._idle: list[tuple[float, float] | None] = [None] * len(meters)

    @property
    def poll_s(self) -> float:
        """Time between two readings."""
        period_s = min(trace.info.update_period_s for trace in self._traces)
        return min(max(_POLL_PART * period_s, _POLL_AT_LEAST_S), _POLL_AT_MOST_S)

    def measure_idle(self, seconds: float) -> list[DeviceEnergy]:
        """Record idle power for that long; `finish` subtracts it.

        Where a sensor does not move or fails, its idle power stays unknown, for the reason in ``quality``.

        Raises:
            ValueError: ``seconds`` is not positive.
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds}")
        self._wait(max(settle_s(trace.info) for trace in self._traces))
        start_s = self._time.now()
        self._wait(seconds)
        end_s = self._time.now()
        self._wait(1.5 * max(trace.info.update_period_s for trace in self._traces))
        results = []
        for index, trace in enumerate(self._traces):
            result = trace.result(start_s, end_s, None)
            results.append(result)
            if result.mean_power_w is None or result.stderr_j is None:
                trace.doubts.append(f"idle power is unknown: {result.quality}")
                continue
            self._idle[index] = result.mean_power_w, result.stderr_j / result.seconds
            if not trace.is_steady(start_s, end_s):
                trace.doubts.append("power was not steady before the start: idle power is doubtful")
        return results

    def begin(self) -> float:
        """The moment of the start; `follow` must be called next.

        Where idle power was not measured, it waits for an update of each sensor first.
        """
        if None in self._idle:
            self._wait(1.2 * max(trace.info.update_period_s for trace in self._traces))
        self._read()
        return self._time.now()

    def follow(self, wait: Callable[[float], bool]) -> float:
        """Read the sensors until the stretch has ended; the moment of the end.

        Args:
            wait: waits at most that many seconds; True when the stretch is over.
        """
        while not wait(self.poll_s):
            self._read()
        return self._time.now()

    def finish(self, start_s: float, end_s: float) -> list[DeviceEnergy]:
        """What each device used between two moments; waits for the update after the end."""
        give_up_s = self._time.now() + max(
            0.2, 3 * max(trace.info.update_period_s for trace in self._traces)
        )
        while self._time.now() < give_up_s and not all(
            trace.reaches(end_s) for trace in self._traces
        ):
            self._wait(self.poll_s)
        return [
            trace.result(start_s, end_s, idle)
            for trace, idle in zip(self._traces, self._idle, strict=True)
        ]

    def _wait(self, seconds: float) -> None:
        until_s = self._time.now() + seconds
        self._read()
        while (left_s := until_s - self._time.now()) > 0:
            self._time.sleep(min(left_s, self.poll_s))
            self._read()

    def _read(self) -> None:
        for trace in self._traces:
            trace.read()


@dataclass(frozen=True)
class _Part:
    energy_j: float
    sigma_j: float
    updates: int


class _Trace:
    """What one sensor showed: the updates of a counter, or every reading of a power sensor."""

    def __init__(self, meter: PowerMeter) -> None:
        self.info: MeterInfo = meter.info
        self.doubts: list[str] = []
        self._meter = meter
        self._error: Exception | None = None
        self._lost_j = 0.0
        self._last: Reading | None = None
        self._times_s = array("d")
        self._values = array("d")
        self._gaps_s = array("d")

    def read(self) -> None:
        """Take one reading. The first error ends this trace, and the others go on."""
        if self._error is not None:
            return
        try:
            self._add(self._meter.read())
        except Exception as exc:
            # A command must not die of a sensor: the reason stands in the result.
            self._error = exc

    def _add(self, reading: Reading) -> None:
        last, self._last = self._last, reading
        if reading.energy_j is None:
            assert reading.power_w is not None
            check_power(reading.power_w, self.info)
            self._append(reading.time_s, reading.power_w, 0.0)
            return
        if last is None or last.energy_j is None or reading.energy_j == last.energy_j:
            return
        if reading.energy_j < last.energy_j:
            self._lost_j += last.energy_j
            self.doubts.append("the counter was reset meanwhile; what came just before is missing")
        # Seen late, the newest update still came within one period.
        gap_s = min(reading.time_s - last.time_s, self.info.update_period_s)
        self._append(reading.time_s - 0.5 * gap_s, self._lost_j + reading.energy_j, gap_s)

    def _append(self, time_s: float, value: float, gap_s: float) -> None:
        self._times_s.append(time_s)
        self._values.append(value)
        self._gaps_s.append(gap_s)

    def reaches(self, time_s: float) -> bool:
        """Whether the trace goes on beyond that moment, or never will."""
        return self._error is not None or bool(self._times_s and self._times_s[-1] >= time_s)

    def between(self, start_s: float, end_s: float) -> _Part:
        """Energy between two moments.

        Raises:
            MeasurementTooShort: the sensor did not move often enough.
            MeasurementError, MeterUnavailable: the sensor failed.
        """
        if self._error is not None:
            raise self._error
        part = (
            self._from_counter(start_s, end_s)
            if self.info.method == "counter"
            else self._from_power(start_s, end_s)
        )
        check_power(part.energy_j / max(end_s - start_s, 1e-9), self.info)
        return part

    def is_steady(self, start_s: float, end_s: float) -> bool:
        """Whether the two halves of a stretch have the same power; True where it cannot be told."""
        middle_s = 0.5 * (start_s + end_s)
        try:
            early, late = self.between(start_s, middle_s), self.between(middle_s, end_s)
        except MeasurementError:
            return True
        half_s = middle_s - start_s
        early_w, late_w = early.energy_j / half_s, late.energy_j / half_s
        noise_w = 2 * math.hypot(early.sigma_j, late.sigma_j) / half_s
        return abs(late_w - early_w) <= max(_STEADY * late_w, _STEADY_W, noise_w)

    def result(
        self, start_s: float, end_s: float, idle: tuple[float, float] | None
    ) -> DeviceEnergy:
        """The energy between two moments, or why there is none."""
        seconds = end_s - start_s
        doubts = list(self.doubts)
        try:
            part: _Part | None = self.between(start_s, end_s)
        except Exception as exc:
            part = None
            doubts.append(str(exc))
        energy_j = None if part is None else part.energy_j
        stderr_j = None if part is None else part.sigma_j
        net_j = net_stderr_j = None
        if part is not None and idle is not None:
            net_j = part.energy_j - idle[0] * seconds
            net_stderr_j = math.hypot(part.sigma_j, idle[1] * seconds)
        info = self.info
        return DeviceEnergy(
            device_name=info.device_name,
            device_uuid=info.device_uuid,
            meter=info.meter,
            method=info.method,
            scope=info.scope,
            simulated=info.simulated,
            seconds=seconds,
            energy_j=energy_j,
            stderr_j=stderr_j,
            idle_power_w=None if idle is None else idle[0],
            net_energy_j=net_j,
            net_stderr_j=net_stderr_j,
            mean_power_w=None if energy_j is None else energy_j / seconds,
            sensor_updates=0 if part is None else part.updates,
            quality="; ".join(dict.fromkeys(doubts)) or "good",
            notes=info.notes,
        )

    def _from_counter(self, start_s: float, end_s: float) -> _Part:
        times_s = self._times_s
        first, last = bisect_right(times_s, start_s), bisect_right(times_s, end_s)
        if last - first < 2:
            raise self._too_short(end_s - start_s)
        start_j, start_sigma_j = self._at(start_s)
        end_j, end_sigma_j = self._at(end_s)
        steps_j = self.info.resolution_j or 0.0
        sigma_j = math.sqrt(start_sigma_j**2 + end_sigma_j**2 + steps_j**2 / 6)
        return _Part(end_j - start_j, sigma_j, last - first)

    def _at(self, time_s: float) -> tuple[float, float]:
        """Counter at a moment, and its standard error."""
        times_s, values = self._times_s, self._values
        right = min(max(bisect_right(times_s, time_s), 1), len(times_s) - 1)
        t0, t1 = times_s[right - 1], times_s[right]
        interval_j = values[right] - values[right - 1]
        power_w = interval_j / max(t1 - t0, 1e-9)
        # Outside of the trace the nearest interval goes on: half of its energy more or less.
        value = values[right - 1] + power_w * (time_s - t0)
        timing_j = power_w * max(self._gaps_s[right - 1], self._gaps_s[right])
        return value, math.hypot(interval_j, timing_j) / math.sqrt(12)

    def _from_power(self, start_s: float, end_s: float) -> _Part:
        times_s, values = self._times_s, self._values
        first, last = bisect_right(times_s, start_s), bisect_right(times_s, end_s)
        inside = values[first:last]
        updates = sum(1 for one, other in pairwise(inside) if one != other)
        if updates < 1 or end_s - start_s < self.info.update_period_s:
            raise self._too_short(end_s - start_s)
        corners_s = [start_s, *times_s[first:last], end_s]
        corners_w = [inside[0], *inside, inside[-1]]
        energy_j = sum(
            0.5 * (corners_w[i] + corners_w[i + 1]) * (corners_s[i + 1] - corners_s[i])
            for i in range(len(corners_s) - 1)
        )
        edges_j = fmean(inside) * self.info.update_period_s / math.sqrt(6)
        scatter_j = (end_s - start_s) * stdev(inside) / math.sqrt(updates + 1)
        return _Part(energy_j, math.hypot(edges_j, scatter_j), updates)

    def _too_short(self, seconds: float) -> MeasurementError:
        needed_s = 4 * self.info.update_period_s
        if seconds > 2 * needed_s:
            return MeasurementError(
                f"the sensor did not move in {seconds:.3g} s: it is stuck; reload the driver, or "
                "choose another sensor"
            )
        return MeasurementTooShort(
            f"{seconds:.3g} s are too short for a sensor that updates every "
            f"{self.info.update_period_s:.3g} s; measure {needed_s:.3g} s or more",
            needed_s,
        )
