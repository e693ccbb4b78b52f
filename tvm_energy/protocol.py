"""How the energy of one kernel is measured.

::

    device  ░│▒▒▒▒▒▒▒▒▒▒▒▒▒▒│███████████████████│█│███████████████████│ ...
            calibrate      warm-up    align window 1        align window 2
             (launch time)  (until power      (opens and closes on an update of
                             is steady)        the sensor; launches counted)

1. *Calibrate*: a few launches tell how many make a chunk of `MeasurementPlan.chunk_s`.
2. *Warm up* for `MeasurementPlan.warmup_s` at load, longer while power still moves: clocks, voltage and
   temperature settle, and the sensor forgets what ran before.
3. *Windows* (`tvm_energy.meters.window`) until the relative standard error reaches the target, or
   `max_windows`, or the budget ends. A window in which the counter was reset is repeated.
4. *Result*: energy a launch is the mean over windows. Its standard error is the larger of two: what
   the sensor alone makes uncertain (when the updates at the edges came, resolution, noise of its
   readings), and the scatter of the windows divided by sqrt(n). Scatter known from few windows is
   itself uncertain, so it is scaled with Student's t, such that twice the standard error covers
   95 %; kernels measured together share what their windows tell about it, and know what earlier
   kernels of the run told (`MeasurementPlan.scatter`). It is never zero. Added
   to it: what the device may have drawn while it waited for the host between chunks. Not in it: the
   gain error of the card's sensor, which is the same for all kernels on that card.

Several kernels are measured interleaved, A B C A B C ..., so that slow drift (temperature) meets all
of them alike. Time is that of the meter, real or virtual, and so is all waiting.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, stdev

from tvm_energy.errors import MeasurementError, MeasurementTooShort, TvmEnergyError
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan, WindowScatter
from tvm_energy.meters.base import DeviceState, Load, PowerMeter, Reading
from tvm_energy.meters.window import (
    BusyDevice,
    CounterReset,
    Window,
    check_power,
    integrate_j,
    measure_window,
    settle_s,
)

__all__ = ["calibrate", "measure", "measure_idle_power", "measure_interleaved"]

#: Power is steady when two successive stretches differ by less than this.
_STEADY = 0.03

#: Readings during the warm-up, in update periods: close enough to tell 3 % from a few updates.
_WARM_UP_PART = 0.03

#: The core clock is called unsteady when it moved by more than this over the windows.
_CLOCK_MOVED = 0.02

#: A device that waited for the host longer than this part of the time was not measured under load.
_MUCH_IDLE = 0.05

#: Windows lost to counter resets before the measurement is given up.
_MAX_RESETS = 3

_MAX_CALIBRATION_LAUNCHES = 1 << 20

#: An idle device needs seconds to come down after a kernel (cuda-samples#74: 50 W instead of 25 W).
_IDLE_SETTLE_S = 15.0

_IDLE_NAME = "gpu_idle"
_THERMAL = ("thermal", "hw_slowdown", "power_brake")


def measure(
    load: Load, meter: PowerMeter, plan: MeasurementPlan, *, idle_power_w: float | None = None
) -> EnergyMeasurement:
    """Measure the energy of one launch.

    Args:
        load: the kernel.
        meter: sensor of the device that the kernel runs on.
        plan: how to measure.
        idle_power_w: what to subtract where ``plan.net_of_idle``; None measures it first.

    Raises:
        MeasurementTooShort: the sensor did not move enough within the budget.
        MeasurementError: the kernel failed, or the sensor is stuck or not plausible.
        MeterUnavailable: the sensor is gone.
    """
    (result,) = _measure_all([load], meter, plan, idle_power_w)
    if isinstance(result, MeasurementError):
        raise result
    return result


def measure_interleaved(
    loads: Sequence[Load],
    meter: PowerMeter,
    plan: MeasurementPlan,
    *,
    idle_power_w: float | None = None,
) -> list[EnergyMeasurement | MeasurementError]:
    """Measure several kernels in turns, one window each; a result or an error for each of them.

    Args:
        loads: the kernels; all run on the device of ``meter``.
        meter: the sensor.
        plan: how to measure; the budget is that of each kernel.
        idle_power_w: as in `measure`.

    Raises:
        MeterUnavailable: the sensor is gone.
    """
    return _measure_all(loads, meter, plan, idle_power_w)


def measure_idle_power(meter: PowerMeter, seconds: float) -> float:
    """Mean power of the device while nothing runs, in watts, over at least that many seconds.

    Waits until power is steady first: for up to 15 s after a kernel it is not.

    Raises:
        MeasurementTooShort: the sensor did not move.
        MeasurementError: the reading is not plausible.
        ValueError: ``seconds`` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    give_up_s = meter.time.now() + _IDLE_SETTLE_S
    stretch_s = max(1.0, 5 * meter.info.update_period_s)
    before_w = _idle_stretch_w(meter, stretch_s)
    while meter.time.now() < give_up_s:
        now_w = _idle_stretch_w(meter, stretch_s)
        if abs(now_w - before_w) <= _STEADY * now_w:
            break
        before_w = now_w
    return _idle_stretch_w(meter, seconds)


def _idle_stretch_w(meter: PowerMeter, seconds: float) -> float:
    # Reading a processor's counter often would itself cost energy.
    wait_s = max(0.1 * meter.info.update_period_s, 0.01)
    readings = [meter.read()]
    while readings[-1].time_s - readings[0].time_s < seconds:
        meter.time.sleep(wait_s)
        readings.append(meter.read())
    power_w, _ = _mean_power(readings, meter)
    if power_w is None:
        raise MeasurementTooShort(
            f"{meter.info.device_name}: the sensor did not move in {seconds:g} s without load; "
            "allow more time, or do not ask for energy net of idle",
            3 * seconds,
        )
    check_power(power_w, meter.info)
    return power_w


def _measure_all(
    loads: Sequence[Load], meter: PowerMeter, plan: MeasurementPlan, idle_power_w: float | None
) -> list[EnergyMeasurement | MeasurementError]:
    if plan.net_of_idle and idle_power_w is None:
        idle_power_w = measure_idle_power(meter, max(1.0, plan.window_s))
    subtract_w = idle_power_w if plan.net_of_idle else None
    scatter = _Scatter(plan.scatter)
    turns = [_Turns(load, meter, plan, scatter, alone=len(loads) == 1) for load in loads]
    for turn in turns:
        turn.prepare()
    while waiting := [turn for turn in turns if turn.wants_more]:
        for turn in waiting:
            turn.add_window()
    return [turn.result(subtract_w) for turn in turns]


class _Turns:
    """One kernel's part of an interleaved measurement: a warm-up, and a window at each turn.

    The first error ends its part; the other kernels go on.
    """

    def __init__(
        self, load: Load, meter: PowerMeter, plan: MeasurementPlan, scatter: _Scatter, alone: bool
    ) -> None:
        self._load = load
        self._meter = meter
        self._plan = plan
        self._scatter = scatter
        self._alone = alone
        self._spent_s = 0.0
        self._resets = 0
        self._windows: list[Window] = []
        self._state_before = DeviceState()
        self._states: list[DeviceState] = []
        self._doubts: list[str] = []
        self._busy: BusyDevice | None = None
        self._budget_ended = False
        self._error: MeasurementError | None = None

    @property
    def wants_more(self) -> bool:
        """Another window is needed and affordable."""
        plan = self._plan
        if self._error is not None or self._budget_ended:
            return False
        if not self._windows:
            return True
        if plan.enough(len(self._windows), *self._energy_a_launch()):
            return False
        lead_s = 0.0 if self._alone else settle_s(self._meter.info)
        needed_s = lead_s + plan.window_s + self._meter.info.update_period_s
        return self._spent_s + needed_s <= plan.budget_s

    def prepare(self) -> None:
        """Calibrate and warm up."""
        with self._turn() as deadline_s:
            latency_s = calibrate(self._load, self._meter, self._plan.chunk_s, deadline_s)
            self._busy = BusyDevice(
                self._load,
                self._meter,
                latency_s,
                self._plan.chunk_s,
                random.Random(self._plan.seed),
            )
            while self._lost_to_reset(lambda: self._warm_up(deadline_s)):
                pass

    def add_window(self) -> None:
        """Measure one window; `wants_more` decides about another."""
        with self._turn() as deadline_s:
            self._lost_to_reset(lambda: self._add_window(deadline_s))

    def _warm_up(self, deadline_s: float) -> None:
        assert self._busy is not None
        if not _warm_up(self._busy, self._plan.warmup_s, deadline_s):
            self._doubts.append("power was not steady after the warm-up")
        self._state_before = self._busy.state()

    def _add_window(self, deadline_s: float) -> None:
        assert self._busy is not None
        if not self._alone:
            self._busy.forget_value()  # other kernels ran meanwhile
            _run_for(self._busy, settle_s(self._meter.info))
        self._windows.append(measure_window(self._busy, self._plan.window_s, deadline_s))
        self._scatter.update(self, _energies_a_launch(self._windows))
        self._states.append(self._busy.state())

    def _lost_to_reset(self, step: Callable[[], None]) -> bool:
        """Do one step; True when a reset of the counter spoilt it and it must be repeated."""
        try:
            step()
        except CounterReset as exc:
            self._resets += 1
            if self._resets >= _MAX_RESETS:
                raise MeasurementError(
                    f"{exc}, {self._resets} times; keep the driver loaded (persistence mode) while "
                    "measuring"
                ) from exc
            return True
        return False

    @contextlib.contextmanager
    def _turn(self) -> Iterator[float]:
        """One stay on the device: its time is booked, its errors end this kernel's part."""
        started_s = self._meter.time.now()
        try:
            yield started_s + self._plan.budget_s - self._spent_s
            if self._busy is not None:
                self._busy.finish_chunk()
        except MeasurementTooShort as exc:
            self._budget_ended = True
            if not self._windows:
                self._error = exc
        except MeasurementError as exc:
            self._error = exc
        except TvmEnergyError:
            raise
        except Exception as exc:  # the load is foreign code: anything may come out of it
            self._error = MeasurementError(
                f"the kernel failed while it was measured ({type(exc).__name__}: {exc})"
            )
            self._error.__cause__ = exc
        finally:
            with contextlib.suppress(Exception):
                self._load.synchronize()
            self._spent_s += self._meter.time.now() - started_s

    def result(self, idle_power_w: float | None) -> EnergyMeasurement | MeasurementError:
        """The measurement, gross or net of idle power."""
        if self._error is not None:
            return self._error
        info = self._meter.info
        energy_j, stderr_j = self._energy_a_launch()
        windows = self._windows
        launches = sum(window.launches for window in windows)
        seconds = sum(window.seconds for window in windows)
        latency_s = sum(window.latency_s * window.launches for window in windows) / launches
        idle_share = sum(window.idle_share * window.seconds for window in windows) / seconds
        timed = all(window.busy_s is not None for window in windows)
        if idle_power_w is not None:
            energy_j -= idle_power_w * latency_s
            if energy_j <= 0:
                return MeasurementError(
                    f"{info.device_name}: the kernel draws no more than the idle power of "
                    f"{idle_power_w:.4g} W; measure gross energy (net_of_idle=False)"
                )
        states = [self._state_before, *self._states]
        clocks = [state.clock_mhz for state in states if state.clock_mhz is not None]
        return EnergyMeasurement(
            energy_j=energy_j,
            stderr_j=stderr_j,
            latency_s=latency_s,
            launches=max(1, round(launches)),
            windows=len(windows),
            window_s=seconds,
            sensor_updates=sum(window.updates for window in windows),
            method=info.method,
            meter=info.meter,
            scope=info.scope,
            clock_mhz=fmean(clocks) if clocks else None,
            clock_before_mhz=self._state_before.clock_mhz,
            clock_after_mhz=self._states[-1].clock_mhz,
            temperature_before_c=self._state_before.temperature_c,
            temperature_c=self._states[-1].temperature_c,
            throttle_reasons=self._throttle_reasons(),
            idle_power_w=idle_power_w,
            idle_share=idle_share if timed else None,
            device_s=self._spent_s,
            quality=self._quality(stderr_j / energy_j, clocks, idle_share),
            simulated=info.simulated,
            window_scatter=_relative_stdev(_energies_a_launch(windows)),
        )

    def _energy_a_launch(self) -> tuple[float, float]:
        """Mean joules a launch over the windows, and its standard error (see the module)."""
        energies_j = _energies_a_launch(self._windows)
        count = len(energies_j)
        energy_j = fmean(energies_j)
        sensor_j = math.hypot(*(w.sigma_j / w.launches for w in self._windows)) / count
        own_j = stdev(energies_j) / math.sqrt(count) if count > 1 else 0.0
        pooled_j = energy_j * self._scatter.of_one_window() / math.sqrt(count)
        gaps_j = fmean(window.sigma_gaps_j for window in self._windows)
        return energy_j, math.hypot(max(sensor_j, own_j, pooled_j), gaps_j)

    def _throttle_reasons(self) -> tuple[str, ...]:
        states = [self._state_before, *self._states]
        reasons = {reason for state in states for reason in state.throttle_reasons}
        return tuple(sorted(reasons - {_IDLE_NAME}))

    def _quality(
        self, relative_stderr: float, clocks_mhz: Sequence[float], idle_share: float
    ) -> str:
        doubts = list(self._doubts)
        if len(self._windows) < self._plan.min_windows:
            doubts.append(f"the budget allowed {len(self._windows)} window(s)")
        if relative_stderr > self._plan.target_relative_stderr:
            doubts.append(f"standard error is {relative_stderr:.1%}")
        if self._resets:
            doubts.append("the counter was reset meanwhile")
        if any(part in reason for reason in self._throttle_reasons() for part in _THERMAL):
            doubts.append("the clock was throttled")
        if clocks_mhz and max(clocks_mhz) > (1 + _CLOCK_MOVED) * min(clocks_mhz):
            doubts.append(f"the clock moved from {min(clocks_mhz):g} to {max(clocks_mhz):g} MHz")
        if idle_share > _MUCH_IDLE:
            doubts.append(f"the device waited for the host {idle_share:.0%} of the time")
        return "; ".join(doubts) or "good"


def calibrate(load: Load, meter: PowerMeter, chunk_s: float, deadline_s: float) -> float:
    """Seconds a launch, roughly, from a run of at least a quarter of a chunk.

    Args:
        load: the kernel.
        meter: its clock times the launches; the sensor is not read.
        chunk_s: as in `MeasurementPlan`.
        deadline_s: moment on the meter's clock by which it must be known.

    Raises:
        MeasurementTooShort: one launch takes longer than the whole budget.
    """
    load.enqueue(1)  # the first launch loads code and touches memory: not timed
    load.synchronize()
    launches = 1
    while True:
        started_s = meter.time.now()
        load.enqueue(launches)
        load.synchronize()
        elapsed_s = max(meter.time.now() - started_s, 1e-9)
        if meter.time.now() >= deadline_s:
            raise MeasurementTooShort(
                f"the budget ended while the launch time was found: {launches} launch(es) take "
                f"{elapsed_s:.3g} s; allow a budget of {20 * elapsed_s:.3g} s or more",
                20 * elapsed_s,
            )
        if elapsed_s >= 0.25 * chunk_s or launches >= _MAX_CALIBRATION_LAUNCHES:
            return elapsed_s / launches
        wanted = math.ceil(0.5 * chunk_s * launches / elapsed_s)
        launches = min(max(wanted, 2 * launches), 16 * launches, _MAX_CALIBRATION_LAUNCHES)


def _run_for(busy: BusyDevice, seconds: float, part: float = 0.5) -> list[Reading]:
    """Keep the kernel running for that long; readings each ``part`` of the update period."""
    wait_s = part * busy.meter.info.update_period_s
    readings = [busy.read(0.0)]
    while readings[-1].time_s - readings[0].time_s < seconds:
        readings.append(busy.read(wait_s))
    return readings


def _warm_up(busy: BusyDevice, warmup_s: float, deadline_s: float) -> bool:
    """Run at load until power is steady, for at most twice the time. True when it is steady."""
    if warmup_s == 0:
        return True
    stretch_s = max(warmup_s / 3, 2.5 * busy.meter.info.update_period_s)
    wanted_s = max(warmup_s, 2 * stretch_s, 2 * settle_s(busy.meter.info))
    left_s = max(0.0, deadline_s - busy.meter.time.now())
    readings = _run_for(busy, min(wanted_s, left_s), _WARM_UP_PART)
    started_s = readings[0].time_s
    while not _is_steady(readings, stretch_s, busy.meter):
        now_s = readings[-1].time_s
        if now_s - started_s > 2 * wanted_s or now_s + stretch_s > deadline_s:
            return False
        readings += _run_for(busy, 0.5 * stretch_s, _WARM_UP_PART)
    return True


def _is_steady(readings: Sequence[Reading], stretch_s: float, meter: PowerMeter) -> bool:
    """Whether the power of the last two stretches agrees, within what the sensor can tell."""
    end_s = readings[-1].time_s
    late = [r for r in readings if r.time_s > end_s - stretch_s]
    early = [r for r in readings if end_s - 2 * stretch_s < r.time_s <= end_s - stretch_s]
    late_w, late_sigma_w = _mean_power(late, meter)
    early_w, early_sigma_w = _mean_power(early, meter)
    if late_w is None or early_w is None:
        return False
    noise_w = 2 * math.hypot(late_sigma_w, early_sigma_w)
    return abs(late_w - early_w) <= max(_STEADY * late_w, noise_w)


def _mean_power(readings: Sequence[Reading], meter: PowerMeter) -> tuple[float | None, float]:
    """Mean power and its standard error in watts; (None, 0) where the sensor moved too little."""
    if len(readings) < 2:
        return None, 0.0
    if readings[0].energy_j is None:
        seconds = readings[-1].time_s - readings[0].time_s
        return integrate_j(readings) / seconds, 0.0
    seen = [readings[0]]
    gap_s = 0.0
    for before, reading in pairwise(readings):
        if reading.energy_j != seen[-1].energy_j:
            seen.append(reading)
            gap_s = max(gap_s, min(reading.time_s - before.time_s, meter.info.update_period_s))
    if len(seen) < 3:  # the first value may have stood for a while: the second opens
        return None, 0.0
    opening, closing = seen[1], seen[-1]
    assert opening.energy_j is not None
    assert closing.energy_j is not None
    seconds = closing.time_s - opening.time_s
    power_w = (closing.energy_j - opening.energy_j) / seconds
    return power_w, power_w * gap_s / math.sqrt(6) / seconds


def _energies_a_launch(windows: Sequence[Window]) -> list[float]:
    return [window.energy_a_launch_j for window in windows]


class _Scatter:
    """How windows scatter, as the kernels measured together tell and what is known from before."""

    def __init__(self, before: WindowScatter) -> None:
        self._before = before
        self._kernels: dict[object, WindowScatter] = {}

    def update(self, kernel: object, energies: Sequence[float]) -> None:
        """Take note of all windows of a kernel so far."""
        relative = _relative_stdev(energies)
        if relative is not None:
            freedom = len(energies) - 1
            self._kernels[kernel] = WindowScatter(freedom * relative**2, freedom)

    def of_one_window(self) -> float:
        """See `WindowScatter.of_one_window`."""
        return sum(self._kernels.values(), start=self._before).of_one_window()


def _relative_stdev(energies: Sequence[float]) -> float | None:
    return stdev(energies) / fmean(energies) if len(energies) > 1 else None
