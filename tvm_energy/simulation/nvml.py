"""A simulated NVML: the functions of the module ``pynvml`` over virtual time.

What a real sensor does to the truth, in this order::

    true power ─► average over a window ─► gain and offset of the card ─► noise of one update
                                        ─► held until the next update ─► rounded to 1 mW / 1 mJ

so that the measuring code meets the same difficulties as on a card: stale values, a window that sees a
quarter of the time, a counter that lags and moves in steps. The sensor classes are published; where a
number is our estimate, it says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorSpec:
    """How a card's power sensor distorts the truth.

    Attributes:
        update_period_s: time between updates of counter and power.
        averaging_window_s: one instant reading is the mean over this time before its update.
        long_average_s: window of the averaged power (NVML field 185).
        usage_is_instant: True where nvmlDeviceGetPowerUsage is instantaneous (GA100 and before
            Ampere), False where it is the long average.
        has_counter, has_instant: whether the card has nvmlDeviceGetTotalEnergyConsumption and
            field 186.
        gain, offset_w: reading = gain x truth + offset, of this card.
        noise_w: standard deviation of the noise of one update (estimate: no publication gives it).
        counter_step_j: resolution of the counter.
        counter_lag_s: the counter at an update holds the energy up to this long before
            (estimate).
        update_jitter_s: an update becomes visible up to this long after the moment that it belongs
            to (estimate).
        call_cost_s: virtual time of one call (estimate; real calls take about 10 to 1000 us).
        source: where the figures come from.
    """

    update_period_s: float = 0.1
    averaging_window_s: float = 0.1
    long_average_s: float = 1.0
    usage_is_instant: bool = False
    has_counter: bool = True
    has_instant: bool = True
    gain: float = 1.0
    offset_w: float = 0.0
    noise_w: float = 0.3
    counter_step_j: float = 1e-3
    counter_lag_s: float = 0.01
    update_jitter_s: float = 0.0005
    call_cost_s: float = 50e-6
    source: str = ""

    def __post_init__(self) -> None:
        positive = ("update_period_s", "averaging_window_s", "long_average_s", "counter_step_j")
        for name in (*positive, "gain"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("noise_w", "counter_lag_s", "update_jitter_s", "call_cost_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


_PART_TIME = (
    "Yang, Adamek, Armour, Part-time Power Measurements, arXiv:2312.02741; "
    "GPU_Power_Benchmark, Overall_Results.xlsx"
)

#: GA100: 25 ms seen of every 100 ms; PowerUsage is instantaneous. Gain from the slope against an
#: external meter on an A100 PCIe (0.954; its offset is not published).
A100_SENSOR = SensorSpec(
    averaging_window_s=0.025, usage_is_instant=True, gain=0.954, source=_PART_TIME
)

#: RTX 4090: instant power sees everything, PowerUsage is a 1 s average. Slope 1.044, offset -22.6 W.
ADA_SENSOR = SensorSpec(
    averaging_window_s=0.1, gain=1.044, offset_w=-22.6, source=_PART_TIME + " (RTX 4090)"
)

#: GH100: 25 ms seen of every 100 ms; PowerUsage is a 1 s average. Its gain was not published.
HOPPER_SENSOR = SensorSpec(averaging_window_s=0.025, source=_PART_TIME + " (H100)")

#: Volta: 10 ms seen of every 20 ms; no field 186 in its time (drivers before 530).
VOLTA_SENSOR = SensorSpec(
    update_period_s=0.02,
    averaging_window_s=0.01,
    usage_is_instant=True,
    has_instant=False,
    source=_PART_TIME + " (V100)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedState:
    """What else NVML tells: core clock, die temperature, bits of the throttle reasons."""

    clock_mhz: float
    temperature_c: float
    throttle_bits: int = 0


class SimulatedNvmlError(Exception):
    """Stands for ``pynvml.NVMLError``; `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"simulated NVML error {value}")
        self.value = value


class SimulatedNvml:
    """One simulated card, as an object with the functions of the module ``pynvml``.

    Args:
        timeline: true power of the card.
        clock: virtual time; every call costs some of it.
        sensor: how readings differ from the truth.
        name: name of the card; ``Simulated`` is put before it.
        uuid: identity of the card.
        driver_version: what nvmlSystemGetDriverVersion says.
        power_limit_w: enforced power limit.
        state: tells clock, temperature and throttle reasons at the present virtual moment.
        lock_clock: locks the core clock at that many MHz, or releases it (None); without it
            clocks cannot be locked.
        clocks_mhz: core clocks that can be locked, highest first.
        seed: phase of the updates, and their noise.
    """

    simulated = True

    NVMLError = SimulatedNvmlError
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_FI_DEV_POWER_AVERAGE = 185
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_POWER_SCOPE_GPU = 0
    NVML_POWER_SCOPE_MODULE = 1
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(
        self,
        timeline: PowerTimeline,
        clock: VirtualClock,
        sensor: SensorSpec,
        *,
        name: str,
        uuid: str,
        driver_version: str = "simulated",
        power_limit_w: float,
        state: Callable[[], SimulatedState],
        lock_clock: Callable[[float | None], None] | None = None,
        clocks_mhz: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        self.clock = clock
        self.sensor = sensor
        self._timeline = timeline
        self._name = name if name.startswith("Simulated") else f"Simulated {name}"
        self._uuid = uuid
        self._driver_version = driver_version
        self._power_limit_w = power_limit_w
        self._state = state
        self._lock_clock = lock_clock
        self._clocks_mhz = list(clocks_mhz)
        self._users = 0
        rng = random.Random(f"{uuid}/{seed}")
        self._updates = _Updates(sensor, clock.now(), rng)
        self._counter = _Counter(timeline, sensor, random.Random(f"{uuid}/{seed}/counter"))
        self._instant = _HeldPower(timeline, sensor, sensor.averaging_window_s, rng.random())
        self._average = _HeldPower(timeline, sensor, sensor.long_average_s, rng.random())

    def nvmlInit(self) -> None:
        """Open the library."""
        self._users += 1

    def nvmlShutdown(self) -> None:
        """Close the library."""
        self._check_open()
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        """Version of the simulated driver."""
        self._check_open()
        return self._driver_version

    def nvmlDeviceGetCount(self) -> int:
        """One card."""
        self._check_open()
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        """Handle of card 0."""
        self._check_open()
        if index != 0:
            raise SimulatedNvmlError(self.NVML_ERROR_INVALID_ARGUMENT)
        return self._uuid

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        """Handle of the card of that UUID."""
        self._check_open()
        if uuid != self._uuid:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_FOUND)
        return self._uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        """Identity of the card."""
        self._check(handle)
        return self._uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        """Name of the card."""
        self._check(handle)
        return self._name

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        """Not supported: a simulated card is not divided."""
        self._check(handle)
        raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        """Nobody else."""
        self._check(handle)
        return []

    def nvmlDeviceGetArchitecture(self, handle: str) -> int:
        """Volta (5) where PowerUsage is instantaneous, Ada (8) where it is an average."""
        self._check(handle)
        return 5 if self.sensor.usage_is_instant else 8

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        """Power limit in mW."""
        self._check(handle)
        return round(self._power_limit_w * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        """Core clock in MHz."""
        self._check(handle)
        if kind != self.NVML_CLOCK_SM:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return round(self._state().clock_mhz)

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        """Die temperature in degrees Celsius."""
        self._check(handle)
        return round(self._state().temperature_c)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        """Bits of what limits the clock."""
        self._check(handle)
        return self._state().throttle_bits

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        """Highest core clock in MHz."""
        self._check(handle)
        if kind != self.NVML_CLOCK_SM or not self._clocks_mhz:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return self._clocks_mhz[0]

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: str) -> list[int]:
        """Not supported: the memory clock of a simulated card is fixed and has no number."""
        self._check(handle)
        raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, lowest_mhz: int, highest_mhz: int) -> None:
        """Lock the core clock at the nearest supported value of at most ``highest_mhz``."""
        self._check(handle)
        if self._lock_clock is None:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        possible = [clock for clock in self._clocks_mhz if clock <= highest_mhz]
        if lowest_mhz > highest_mhz or not possible or highest_mhz > self._clocks_mhz[0]:
            raise SimulatedNvmlError(self.NVML_ERROR_INVALID_ARGUMENT)
        self._lock_clock(float(possible[0]))

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:
        """Release the core clock."""
        self._check(handle)
        if self._lock_clock is None:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        self._lock_clock(None)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        """Cumulative energy in mJ, held since the last update."""
        self._check(handle)
        if not self.sensor.has_counter:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        index, time_s = self._updates.last(self.clock.now())
        return round(self._counter.read_j(index, time_s) * 1e3)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        """Power in mW: instant or averaged, as on this class of card."""
        self._check(handle)
        held = self._instant if self.sensor.usage_is_instant else self._average
        return self._power_mw(held)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[Any]) -> list[Any]:
        """Instant (186) and averaged (185) power of the GPU, in mW."""
        self._check(handle)
        return [self._field(field) for field in fields]

    def _field(self, field: Any) -> Any:
        number, scope = field if isinstance(field, tuple) else (field, 0)
        held = {
            self.NVML_FI_DEV_POWER_INSTANT: self._instant,
            self.NVML_FI_DEV_POWER_AVERAGE: self._average,
        }.get(number)
        if held is None or scope != self.NVML_POWER_SCOPE_GPU or not self.sensor.has_instant:
            return _field_value(self.NVML_ERROR_NOT_SUPPORTED, 0)
        return _field_value(0, self._power_mw(held))

    def _power_mw(self, held: _HeldPower) -> int:
        return round(held.read_w(*self._updates.last(self.clock.now())) * 1e3)

    def _check(self, handle: str) -> None:
        self._check_open()
        if handle != self._uuid:
            raise SimulatedNvmlError(self.NVML_ERROR_INVALID_ARGUMENT)

    def _check_open(self) -> None:
        if self._users < 1:
            raise SimulatedNvmlError(self.NVML_ERROR_UNINITIALIZED)
        self.clock.advance(self.sensor.call_cost_s)


def _field_value(code: int, milliwatts: int) -> Any:
    """Like ``pynvml.c_nvmlFieldValue_t``."""
    return SimpleNamespace(
        nvmlReturn=code,
        valueType=SimulatedNvml.NVML_VALUE_TYPE_UNSIGNED_INT,
        value=SimpleNamespace(uiVal=milliwatts),
    )


class _Updates:
    """When the sensor updates: on a schedule with a random phase, each update shown a little late."""

    def __init__(self, sensor: SensorSpec, start_s: float, rng: random.Random) -> None:
        self._period_s = sensor.update_period_s
        self._jitter_s = min(sensor.update_jitter_s, 0.5 * sensor.update_period_s)
        self._first_s = start_s - rng.random() * self._period_s
        self._delay_phase = rng.random()
        self._last = (-1, self._first_s - self._period_s)
        self._next_shown_s = -math.inf

    def last(self, now_s: float) -> tuple[int, float]:
        """Number of the update shown now, and the scheduled moment that its values belong to."""
        if now_s >= self._next_shown_s:
            index = math.floor((now_s - self._first_s) / self._period_s)
            if self._shown_s(index) > now_s:
                index -= 1
            self._last = (index, self._first_s + index * self._period_s)
            self._next_shown_s = self._shown_s(index + 1)
        return self._last

    def _shown_s(self, index: int) -> float:
        # Multiples of the golden ratio, modulo 1, are spread evenly and look irregular.
        delay = (index * 0.6180339887498949 + self._delay_phase) % 1.0
        return self._first_s + index * self._period_s + delay * self._jitter_s


class _Counter:
    """Cumulative energy as the sensor sees it; each update adds energy and noise."""

    def __init__(self, timeline: PowerTimeline, sensor: SensorSpec, rng: random.Random) -> None:
        self._timeline = timeline
        self._sensor = sensor
        self._rng = rng
        # Counters run since the driver was loaded: an arbitrary, large value.
        self._energy_j = 1e3 + 1e5 * rng.random()
        self._index: int | None = None
        self._until_s = 0.0
        self._true_j = 0.0

    def read_j(self, index: int, time_s: float) -> float:
        """Value held since that update, in whole steps."""
        if index != self._index:
            self._advance(index, time_s - self._sensor.counter_lag_s)
        step_j = self._sensor.counter_step_j
        return math.floor(self._energy_j / step_j) * step_j

    def _advance(self, index: int, until_s: float) -> None:
        sensor = self._sensor
        true_j = self._timeline.cumulative_j(until_s)
        if self._index is not None:
            updates = index - self._index
            seen_j = sensor.gain * (true_j - self._true_j)
            seen_j += sensor.offset_w * (until_s - self._until_s)
            # Independent noise of each update adds up like a random walk.
            noise_j = sensor.noise_w * sensor.update_period_s * math.sqrt(updates)
            self._energy_j += max(0.0, seen_j + self._rng.gauss(0.0, noise_j))
        self._index, self._until_s, self._true_j = index, until_s, true_j


class _HeldPower:
    """Power over a window before each update, held until the next."""

    def __init__(
        self, timeline: PowerTimeline, sensor: SensorSpec, window_s: float, seed: float
    ) -> None:
        self._timeline = timeline
        self._sensor = sensor
        self._window_s = window_s
        self._rng = random.Random(seed)
        self._index: int | None = None
        self._power_w = 0.0

    def read_w(self, index: int, time_s: float) -> float:
        """Watts held since that update; never negative."""
        if index != self._index:
            true_w = self._timeline.mean_power_w(time_s - self._window_s, time_s)
            seen_w = self._sensor.gain * true_w + self._sensor.offset_w
            self._power_w = max(0.0, seen_w + self._rng.gauss(0.0, self._sensor.noise_w))
            self._index = index
        return self._power_w
