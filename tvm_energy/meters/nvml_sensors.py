"""The power and energy sensors that NVML offers, behind one shape, and how one is chosen.

Order of preference, each probed and not assumed from the architecture:

1. ``counter``: nvmlDeviceGetTotalEnergyConsumption, mJ since the driver was loaded. It misses nothing
   between two readings. Supported and *moving*, or it is not taken.
2. ``instant``: field 186, power now, in mW; scope 0 is the GPU, scope 1 the module (GPU and CPU on
   Grace Hopper), scope 2 the memory.
3. ``usage``: nvmlDeviceGetPowerUsage. Instantaneous on GA100 and before Ampere, else the mean of the
   last second (NVML API reference).

Counter and ``usage`` of a Grace Hopper belong to the whole module (zeus#172, zeus#242). The memory alone is
measured only when asked for; parts that lack its instant power may give its average (field 185).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tvm_energy.meters.nvml_errors import FUNCTION_NOT_FOUND, NOT_SUPPORTED, code_of, errors_of

SensorName = Literal["counter", "instant", "usage"]
SENSOR_NAMES: tuple[SensorName, ...] = ("counter", "instant", "usage")
ScopeName = Literal["gpu", "module", "memory"]
SCOPE_NAMES: tuple[ScopeName, ...] = ("gpu", "module", "memory")

_FIELD_POWER_AVERAGE = 185
_FIELD_POWER_INSTANT = 186
#: NVML's power scopes, in this order.
_SCOPE_NUMBERS: dict[ScopeName, int] = {"gpu": 0, "module": 1, "memory": 2}
_ARCHITECTURE_AMPERE = 7
#: Ampere parts with the GA100 chip; NVML does not tell the chip.
_GA100_NAMES = ("A100", "A800", "A30 ", "A30-", "PG506")

#: NVML's nvmlValueType_t -> the member of nvmlValue_t that holds the number.
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}

_COUNTER_STEP_J = 1e-3


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """One readable sensor.

    Attributes:
        name: ``counter``, ``instant`` (a field value) or ``usage``.
        method, scope, resolution_j: as in `tvm_energy.meters.base.MeterInfo`.
        read: returns joules (counter) or watts; raises ``nvml.NVMLError``.
        title: for messages.
    """

    name: SensorName
    method: str
    scope: str
    read: Callable[[], float]
    title: str
    resolution_j: float | None = None


def supported_sensors(
    nvml: Any, handle: Any, device_name: str, scope: ScopeName | None = None
) -> Iterator[Sensor]:
    """The sensors that answer, best first.

    Args:
        nvml: a module like ``pynvml``.
        handle: the GPU.
        device_name: its name.
        scope: only sensors that cover just this; None takes those of the GPU and of the module.
    """
    for sensor in _all_sensors(nvml, handle, device_name):
        if sensor.scope != scope and (scope is not None or sensor.scope == "memory"):
            continue
        try:
            sensor.read()
        except errors_of(nvml) as exc:
            if code_of(exc) not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                raise
        else:
            yield sensor


def _all_sensors(nvml: Any, handle: Any, device_name: str) -> Iterator[Sensor]:
    board = "module" if is_grace_hopper(nvml, handle) else "gpu"
    yield Sensor(
        name="counter",
        method="counter",
        scope=board,
        read=lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3,
        title="cumulative energy counter",
        resolution_j=_COUNTER_STEP_J,
    )
    for scope in SCOPE_NAMES:
        yield Sensor(
            name="instant",
            method="power_integral",
            scope=scope,
            read=_field_power(nvml, handle, _FIELD_POWER_INSTANT, scope),
            title=f"instant power of the {scope} (field {_FIELD_POWER_INSTANT})",
        )
    yield Sensor(
        name="instant",
        method="power_average",
        scope="memory",
        read=_field_power(nvml, handle, _FIELD_POWER_AVERAGE, "memory"),
        title=f"average power of the memory (field {_FIELD_POWER_AVERAGE})",
    )
    instant = usage_is_instant(nvml, handle, device_name)
    yield Sensor(
        name="usage",
        method="power_integral" if instant else "power_average",
        scope=board,
        read=lambda: nvml.nvmlDeviceGetPowerUsage(handle) * 1e-3,
        title="power usage" + (" (instantaneous)" if instant else " (mean of the last second)"),
    )


def _field_power(nvml: Any, handle: Any, number: int, scope: ScopeName) -> Callable[[], float]:
    def read_w() -> float:
        fields = nvml.nvmlDeviceGetFieldValues(handle, [(number, _SCOPE_NUMBERS[scope])])
        return field_number(nvml, fields[0]) * 1e-3

    return read_w


def field_number(nvml: Any, field: Any) -> float:
    """The number in a field value.

    The call as a whole succeeds even where a field failed: each carries a return code of its own.
    """
    if field.nvmlReturn != 0:
        raise nvml.NVMLError(field.nvmlReturn)
    member = _MEMBERS.get(field.valueType)
    if member is None:
        raise nvml.NVMLError(NOT_SUPPORTED)
    return float(getattr(field.value, member))


def is_grace_hopper(nvml: Any, handle: Any) -> bool:
    """Whether GPU and processor share a module (NVLink-C2C is on); False where NVML does not say."""
    try:
        return bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
    except errors_of(nvml, AttributeError):
        return False


def usage_is_instant(nvml: Any, handle: Any, device_name: str) -> bool:
    """Whether nvmlDeviceGetPowerUsage is instantaneous on this part; False where in doubt."""
    try:
        architecture = nvml.nvmlDeviceGetArchitecture(handle)
    except errors_of(nvml, AttributeError):
        return False
    if architecture < _ARCHITECTURE_AMPERE:
        return True
    return architecture == _ARCHITECTURE_AMPERE and any(
        part in f"{device_name} " for part in _GA100_NAMES
    )
