"""What a meter, a load and a clock are: three small protocols.

A *meter* reads one sensor, a *load* keeps the device busy with one kernel, a *time source* tells the
time. `tvm_energy.protocol.measure` joins them. A simulated GPU supplies all three under a virtual
clock, so that the same measuring code runs in both worlds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of a sensor.

    Attributes:
        time_s: when it was read, on the meter's time source.
        energy_j: cumulative joules, for a sensor that counts; else None.
        power_w: watts, for a sensor that gives power; else None.
    """

    time_s: float
    energy_j: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Clock, temperature and limits at one moment; None where the device does not tell."""

    clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterInfo:
    """Identity and capabilities of a meter, as they go into log headers.

    Attributes:
        meter: ``nvml``, ``rapl``, ``zeus``, ``simulated``.
        method: ``counter``, ``power_integral`` or ``power_average``.
        scope: what the sensor sees: ``gpu``, ``module``, ``memory``, ``package``, ...
        device_name, device_uuid, driver_version: what is measured.
        update_period_s: measured time between updates of the sensor.
        resolution_j: one step of a counter, in joules; None for power sensors.
        max_power_w: enforced power limit; a reading far above it is not plausible. None if unknown.
        simulated: True for a simulated device.
        notes: warnings that belong to every measurement with this meter (co-tenants, MIG, ...).
    """

    meter: str
    method: str
    scope: str
    device_name: str
    device_uuid: str
    driver_version: str | None = None
    update_period_s: float
    resolution_j: float | None = None
    max_power_w: float | None = None
    simulated: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "notes": list(self.notes)
        }


class TimeSource(Protocol):
    """Monotonic seconds, real or virtual."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let that much time pass."""
        ...


class PowerMeter(Protocol):
    """One energy or power sensor of one device."""

    info: MeterInfo
    time: TimeSource

    def read(self) -> Reading:
        """Read the sensor now.

        Raises:
            MeasurementError: the sensor failed; MeterUnavailable: it is gone for good.
        """
        ...

    def state(self) -> DeviceState:
        """Clock, temperature and throttle reasons now."""
        ...

    def close(self) -> None:
        """Release the sensor."""
        ...


class Load(Protocol):
    """One kernel with its arguments, ready to be launched on the device that the meter watches."""

    def enqueue(self, launches: int) -> None:
        """Queue that many launches. A GPU returns at once, a CPU when they are done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued has finished."""
        ...


@runtime_checkable
class TimedLoad(Load, Protocol):
    """A load that knows, from the device's own clock, how long its launches ran.

    Host time between `enqueue` and the end of `synchronize` contains what the host needs to start the
    first launch and to notice the end of the last; the device is idle meanwhile.
    """

    def device_seconds(self) -> float | None:
        """Device time of the launches that the last `synchronize` waited for; None if unknown."""
        ...
