"""How a kernel is to be measured, and what came out: plain data, no devices.

Units are in the names: ``_s`` seconds, ``_j`` joules, ``_w`` watts, ``_mhz``, ``_c`` degrees Celsius.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Degrees of freedom from which on a race does without a second window. That they are few is in Student's t.
_KNOWN_FREEDOM = 5

#: Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class WindowScatter:
    """How much windows of one kernel differ, relative to their mean, pooled over kernels.

    Attributes:
        squares: sum over the kernels of (windows - 1) x (relative standard deviation)^2.
        freedom: sum of (windows - 1).
    """

    squares: float = 0.0
    freedom: int = 0

    @property
    def known(self) -> bool:
        """Enough kernels have told of it."""
        return self.freedom >= _KNOWN_FREEDOM

    def of_one_window(self) -> float:
        """Relative standard deviation of a window, scaled for the little that is known; 0 if nothing.

        Scaled with Student's t, such that twice the value covers 95 %.
        """
        if self.freedom == 0:
            return 0.0
        known = self.freedom <= len(_STUDENT_T)
        student_t = _STUDENT_T[self.freedom - 1] if known else 1.96 + 2.5 / self.freedom
        return 0.5 * student_t * math.sqrt(self.squares / self.freedom)

    def __add__(self, other: WindowScatter) -> WindowScatter:
        """Pooled."""
        return WindowScatter(self.squares + other.squares, self.freedom + other.freedom)


#: Nothing is known yet.
NO_SCATTER = WindowScatter()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """How one kernel is measured (see ``protocol.py`` for the time line).

    Attributes:
        warmup_s: load applied before the first window, so that clocks and power settle.
        window_s: length of one window. It opens and closes on an update of the sensor.
        min_windows: windows measured at least. A standard error needs two; three make it a
            narrow one (Student's t: 4.3 standard errors of the mean instead of 12.7).
        max_windows: windows measured at most.
        target_relative_stderr: windows are added until standard error / energy is at most this.
        budget_s: device time that the whole measurement may take, warm-up included.
        chunk_s: launches are queued in chunks of about this length; the sensor is read while a
            chunk runs, so that reading does not leave the device idle.
        net_of_idle: subtract idle power x time. Gross joules (False) are what the bill says.
        seed: seed of the random data in the argument buffers.
        rival_j: joules a launch of the kernel to beat: the measurement ends as soon as it is clear on
            which side of it this kernel falls (`enough`). None measures to the target.
        scatter: what earlier kernels told of how windows scatter. What is known is not scaled for the
            few windows of this kernel alone; a race may then end after one.
    """

    warmup_s: float = 0.5
    window_s: float = 0.3
    min_windows: int = 3
    max_windows: int = 12
    target_relative_stderr: float = 0.01
    budget_s: float = 8.0
    chunk_s: float = 0.05
    net_of_idle: bool = False
    seed: int = 0
    rival_j: float | None = None
    scatter: WindowScatter = NO_SCATTER

    def __post_init__(self) -> None:
        for name in ("window_s", "budget_s", "chunk_s", "target_relative_stderr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.warmup_s < 0:
            raise ValueError(f"warmup_s must not be negative, got {self.warmup_s}")
        if not 1 <= self.min_windows <= self.max_windows:
            raise ValueError(
                "windows must satisfy 1 <= min_windows <= max_windows, "
                f"got {self.min_windows} and {self.max_windows}"
            )

    def to_json(self) -> dict[str, Any]:
        """What is the same for all kernels of a run and goes into the log's header.

        That is all but `rival_j` and `scatter`.
        """
        values = dataclasses.asdict(self)
        del values["rival_j"], values["scatter"]
        return values

    def race(self, rival_j: float | None, scatter: WindowScatter = NO_SCATTER) -> MeasurementPlan:
        """The same, but no longer than it takes to tell this kernel from its rival.

        A standard error of 2 % is enough: half of what the energy model errs by, and the best kernels are
        measured again as finalists. So is one window, once earlier kernels have told how windows
        scatter; until then it takes two.

        Args:
            rival_j: joules a launch of the kernel to beat; None while there is none.
            scatter: of the windows of earlier kernels on the same device, measured by the same plan.
        """
        plan = dataclasses.replace(
            self,
            rival_j=rival_j,
            scatter=scatter,
            target_relative_stderr=max(self.target_relative_stderr, _RACE_STDERR),
        )
        return dataclasses.replace(plan, min_windows=min(self.min_windows, plan._race_windows))

    @property
    def _race_windows(self) -> int:
        """Fewest windows of a race; one alone does not tell how windows scatter."""
        return 1 if self.scatter.known else 2

    def enough(self, windows: int, energy_j: float, stderr_j: float) -> bool:
        """True when no further window is wanted.

        Args:
            windows: number so far, at least 1.
            energy_j, stderr_j: joules a launch and its standard error so far.
        """
        if windows >= self.max_windows:
            return True
        race = self.rival_j is not None and windows >= self._race_windows
        if race and abs(energy_j - (self.rival_j or 0.0)) > _CLEAR_SIGMA * stderr_j:
            return True
        return windows >= self.min_windows and stderr_j <= self.target_relative_stderr * energy_j


#: Standard errors between a kernel and its rival at which the race is over.
_CLEAR_SIGMA = 3.0

#: Relative standard error that a race is content with.
_RACE_STDERR = 0.02

#: Finalists: longer windows, and at least three of them, interleaved ABAB.
FINALIST_PLAN = MeasurementPlan(
    window_s=1.0, min_windows=3, max_windows=10, target_relative_stderr=0.005, budget_s=20.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyMeasurement:
    """Energy of one launch of a kernel, measured.

    Attributes:
        energy_j: joules a launch (mean over the windows).
        stderr_j: standard error of ``energy_j``: spread of the windows and resolution of the sensor.
        latency_s: device seconds a launch, from the same windows.
        launches: launches inside the windows.
        windows: number of windows.
        window_s: seconds inside the windows, summed.
        window_scatter: relative standard deviation of the windows' gross joules a launch; None of one
            window.
        sensor_updates: updates of the sensor inside the windows.
        method: ``counter`` (cumulative energy), ``power_integral`` (integrated instant power),
            ``power_average`` (sensor's own average).
        meter: ``nvml``, ``rapl``, ``simulated``, ...
        scope: what the sensor sees: ``gpu``, ``module``, ``memory``, ``package``.
        clock_mhz: core clock observed under load, mean over the windows; None where it cannot be
            read.
        clock_before_mhz, clock_after_mhz: the same before the first and after the last window.
        temperature_before_c: before the first window, under load; None where it cannot be read.
        temperature_c: after the last window.
        throttle_reasons: names of what limited the clock during the measurement.
        idle_power_w: idle power that was subtracted; None for gross joules.
        idle_share: part of the windows in which the device waited for the host, by the device's own
            clock; None where the load has no such clock (see `tvm_energy.meters.base.TimedLoad`).
        device_s: device time spent on the whole measurement, warm-up included.
        quality: ``good``, or a short reason for doubt.
        simulated: True when the device is a simulation.
    """

    energy_j: float
    stderr_j: float
    latency_s: float
    launches: int
    windows: int
    window_s: float
    sensor_updates: int
    method: str
    meter: str
    scope: str
    clock_mhz: float | None = None
    clock_before_mhz: float | None = None
    clock_after_mhz: float | None = None
    temperature_before_c: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    idle_power_w: float | None = None
    idle_share: float | None = None
    device_s: float = 0.0
    quality: str = "good"
    simulated: bool = False
    window_scatter: float | None = None

    @property
    def scatter(self) -> WindowScatter:
        """What this measurement tells of how windows scatter."""
        if self.window_scatter is None or self.windows < 2:
            return NO_SCATTER
        freedom = self.windows - 1
        return WindowScatter(freedom * self.window_scatter * self.window_scatter, freedom)

    @property
    def power_w(self) -> float:
        """Mean power over the windows: joules a launch over seconds a launch."""
        return self.energy_j / self.latency_s

    @property
    def interval_j(self) -> tuple[float, float]:
        """The 95 % interval of ``energy_j``: two standard errors to each side.

        Student's t is already in ``stderr_j``, so that two of them are right for few windows, too.
        """
        return self.energy_j - 2 * self.stderr_j, self.energy_j + 2 * self.stderr_j

    @property
    def relative_stderr(self) -> float:
        """Standard error as a part of the energy."""
        return self.stderr_j / self.energy_j

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["throttle_reasons"] = list(self.throttle_reasons)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EnergyMeasurement:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: when a value is missing or of the wrong type.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = {key: value for key, value in values.items() if key in names}
        reasons = known.get("throttle_reasons", ())
        if not isinstance(reasons, (list, tuple)) or not all(isinstance(r, str) for r in reasons):
            raise TypeError(f"throttle_reasons must be a list of names, got {reasons!r}")
        known["throttle_reasons"] = tuple(reasons)
        measurement = cls(**known)
        if not (measurement.energy_j > 0 and measurement.latency_s > 0):
            raise ValueError(
                f"energy_j and latency_s must be positive, got {measurement.energy_j!r} "
                f"and {measurement.latency_s!r}"
            )
        scatter = measurement.window_scatter
        if scatter is not None and not 0 <= scatter < math.inf:
            raise ValueError(f"window_scatter must not be negative, got {scatter!r}")
        return measurement
