"""NVIDIA GPUs through NVML: the only file that imports ``pynvml``.

Nothing is ever set on the GPU, and the list of supported clocks is never queried (it hangs machines
with an RTX 5070 Ti: NVIDIA/open-gpu-kernel-modules#1239).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from typing import Any

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.base import DeviceState, MeterInfo, Reading, TimeSource
from tvm_energy.meters.nvml_devices import (
    MIG_NOTE,
    GpuInfo,
    choose,
    describe_all,
    mig_problem,
    optional,
    other_processes,
    power_limit_w,
)
from tvm_energy.meters.nvml_errors import opening, reading
from tvm_energy.meters.nvml_sensors import (
    SCOPE_NAMES,
    SENSOR_NAMES,
    ScopeName,
    Sensor,
    SensorName,
    supported_sensors,
)
from tvm_energy.meters.system_time import SystemTime
from tvm_energy.meters.update_period import Changes, watch_changes

__all__ = ["GpuInfo", "NvmlMeter", "list_gpus", "nvml_session", "open_nvml_meter", "throttle_names"]

#: What nvidia-ml-py has and the packages that install a module of the same name may lack.
_NEEDED_NAMES = (
    "NVMLError",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEnergyConsumption",
    "NVML_FI_DEV_POWER_INSTANT",
)
_IMPOSTORS = ("nvidia-ml-py3", "nvidia-ml-py2", "pynvml")

_CLOCK_SM = 1  # NVML_CLOCK_SM
_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU

#: Bits of nvmlClocksEventReasons (nvml.h); 512 and 1024 only in older drivers.
_THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}

_POLL_S = 1e-3
#: Nothing known updates more slowly than every 100 ms; ten times that without a change is no sensor.
_WATCH_LIMIT_S = 1.2
_ASSUMED_PERIOD_S = 0.1

#: Counter and instant power are compared at start; zeus#181 found 187 J against 327 J on one GPU.
_CROSS_CHECK = 0.10
_CROSS_CHECK_W = 5.0

#: What was found out about a GPU's sensors in this process: a worker opens the meter for each kernel,
#: and timing the updates takes as long as a window does.
_timed: dict[tuple[Any, ...], tuple[str, float, list[str]]] = {}


class NvmlMeter:
    """One sensor of one GPU (see `tvm_energy.meters.base.PowerMeter`); made by `open_nvml_meter`."""

    def __init__(
        self, nvml: Any, handle: Any, sensor: Sensor, info: MeterInfo, time: TimeSource
    ) -> None:
        self.info = info
        self.time = time
        self._nvml = nvml
        self._handle = handle
        self._sensor = sensor
        self._closed = False

    def read(self) -> Reading:
        """See `PowerMeter.read`; the time is the middle of the call."""
        before_s = self.time.now()
        with reading(self._nvml, f"reading the {self._sensor.title} of {self.info.device_name}"):
            value = self._sensor.read()
        time_s = 0.5 * (before_s + self.time.now())
        if self._sensor.method == "counter":
            return Reading(time_s=time_s, energy_j=value)
        return Reading(time_s=time_s, power_w=value)

    def state(self) -> DeviceState:
        """See `PowerMeter.state`."""
        nvml, handle = self._nvml, self._handle
        return DeviceState(
            clock_mhz=_number(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM)),
            temperature_c=_number(
                nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU)
            ),
            throttle_reasons=throttle_names(_throttle_bits(nvml, handle)),
        )

    def close(self) -> None:
        """See `PowerMeter.close`; a second call does nothing."""
        if not self._closed:
            self._closed = True
            _stop(self._nvml)


def list_gpus(nvml: Any = None) -> list[GpuInfo]:
    """All GPUs that NVML knows, in its order, with what can be measured on each.

    Args:
        nvml: a module like ``pynvml``; None imports it.

    Raises:
        MeterUnavailable: no library, no driver, no permission; the message says what to do.
    """
    with nvml_session(nvml) as started, opening(started, "listing the GPUs"):
        return describe_all(started)


@contextlib.contextmanager
def nvml_session(nvml: Any = None) -> Iterator[Any]:
    """The module, started and stopped around the block.

    Args:
        nvml: a module like ``pynvml``; None imports it.

    Raises:
        MeterUnavailable: no library, no driver, no permission; the message says what to do.
    """
    nvml = _import_pynvml() if nvml is None else nvml
    _start(nvml)
    try:
        yield nvml
    finally:
        _stop(nvml)


def open_nvml_meter(
    uuid_or_index: str | int | None = None,
    *,
    nvml: Any = None,
    time: TimeSource | None = None,
    field: SensorName | None = None,
    scope: ScopeName | None = None,
    force: bool = False,
) -> NvmlMeter:
    """Open the best energy sensor of a GPU.

    The first time in a process about a second passes while the sensor's updates are timed.

    Args:
        uuid_or_index: UUID, NVML's index, or None for what CUDA would call device 0 (the variable
            CUDA_VISIBLE_DEVICES is honoured).
        nvml: a module like ``pynvml``, real or simulated; None imports the real one.
        time: the time source; None is real time, or that of a simulated module.
        field: ``counter``, ``instant`` or ``usage`` to insist on one sensor; None takes the best
            (see `tvm_energy.meters.nvml_sensors`).
        scope: ``gpu``, ``module`` (GPU and processor of a Grace Hopper) or ``memory`` to insist on what
            the sensor covers; None takes the best sensor of the GPU or, failing that, the module.
        force: measure a GPU that is divided by MIG as a whole; its notes say so.

    Raises:
        MeterUnavailable: with the reason and the remedy.
        ValueError: unknown ``field`` or ``scope``.
    """
    if field is not None and field not in SENSOR_NAMES:
        raise ValueError(f"field must be one of {', '.join(SENSOR_NAMES)}, got {field!r}")
    if scope is not None and scope not in SCOPE_NAMES:
        raise ValueError(f"scope must be one of {', '.join(SCOPE_NAMES)}, got {scope!r}")
    nvml = _import_pynvml() if nvml is None else nvml
    simulated = bool(getattr(nvml, "simulated", False))
    if time is None:
        time = nvml.clock if simulated else SystemTime()
    # A counter may start from zero when the last user of the driver goes: the library stays open as
    # long as the meter.
    _start(nvml)
    try:
        with opening(nvml, "opening the GPU"):
            return _open(nvml, uuid_or_index, time, field, scope, simulated, force)
    except BaseException:
        _stop(nvml)
        raise


def _open(
    nvml: Any,
    uuid_or_index: str | int | None,
    time: TimeSource,
    field: SensorName | None,
    scope: ScopeName | None,
    simulated: bool,
    force: bool,
) -> NvmlMeter:
    gpu, notes = choose(describe_all(nvml), uuid_or_index, force=force)
    if gpu.mig_enabled and gpu.sensors:
        if not force:
            raise MeterUnavailable(mig_problem(gpu.name))
        notes = (*notes, MIG_NOTE)
    elif gpu.problem:
        raise MeterUnavailable(f"{gpu.name} cannot be measured: {gpu.problem}")
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    sensors = list(supported_sensors(nvml, handle, gpu.name, scope))
    sensor, period_s, sensor_notes = _choose_sensor(sensors, time, field, gpu)
    info = MeterInfo(
        meter="simulated" if simulated else "nvml",
        method=sensor.method,
        scope=sensor.scope,
        device_name=gpu.name,
        device_uuid=gpu.uuid,
        driver_version=gpu.driver_version,
        update_period_s=period_s,
        resolution_j=sensor.resolution_j,
        max_power_w=power_limit_w(nvml, handle),
        simulated=simulated,
        notes=(*notes, *sensor_notes, *_neighbour_notes(other_processes(nvml, handle))),
    )
    return NvmlMeter(nvml, handle, sensor, info, time)


def _choose_sensor(
    sensors: list[Sensor], time: TimeSource, field: SensorName | None, gpu: GpuInfo
) -> tuple[Sensor, float, list[str]]:
    """The first sensor that lives; its update period, and notes on it."""
    if not isinstance(time, SystemTime):
        return _time_sensors(sensors, time, field, gpu)
    offered = tuple(sensor.title for sensor in sensors)
    key = (gpu.uuid, gpu.driver_version, field, offered)
    if key in _timed:
        title, period_s, notes = _timed[key]
        return sensors[offered.index(title)], period_s, notes
    sensor, period_s, notes = _time_sensors(sensors, time, field, gpu)
    if period_s != _ASSUMED_PERIOD_S:
        _timed[key] = sensor.title, period_s, notes
    return sensor, period_s, notes


def _time_sensors(
    sensors: list[Sensor], time: TimeSource, field: SensorName | None, gpu: GpuInfo
) -> tuple[Sensor, float, list[str]]:
    notes: list[str] = []
    for sensor in sensors:
        if field not in (None, sensor.name):
            continue
        if sensor.method == "counter":
            same = (s for s in sensors if s.name == "instant" and s.scope == sensor.scope)
            changes, doubt = _watch_counter(sensor, next(same, None), time)
            notes += doubt
            if not changes.times_s:
                notes.append(f"the {sensor.title} does not move; not used")
                continue
        else:
            changes = watch_changes(sensor.read, time, poll_s=_POLL_S, limit_s=_WATCH_LIMIT_S)
        period_s = changes.update_period_s
        if period_s is None:
            period_s = _ASSUMED_PERIOD_S
            notes.append(f"the update period could not be timed; {period_s:g} s is assumed")
        if sensor.method != "counter":
            notes.append(f"no cumulative counter is used: {sensor.title}")
        if sensor.scope == "module":
            notes.append("the sensor covers the whole module, not the GPU alone")
        elif sensor.scope == "memory":
            notes.append("the sensor covers the memory only")
        return sensor, period_s, notes
    wanted = "an energy sensor" if field is None else f"the sensor {field!r}"
    answering = ", ".join(sensor.title for sensor in sensors) or "none"
    raise MeterUnavailable(
        f"{gpu.name} does not offer {wanted} ({'; '.join(notes) or 'it does not answer'}); sensors "
        f"that answer: {answering}; update the driver, or ask for another sensor"
    )


def _watch_counter(
    counter: Sensor, instant: Sensor | None, time: TimeSource
) -> tuple[Changes, list[str]]:
    """Time the counter's updates, and compare its power with the instant power meanwhile."""
    powers_w: list[float] = []
    changes = watch_changes(
        counter.read,
        time,
        poll_s=_POLL_S,
        limit_s=_WATCH_LIMIT_S,
        on_change=None if instant is None else lambda: powers_w.append(instant.read()),
    )
    if len(powers_w) < 3:
        return changes, []
    elapsed_s = changes.times_s[-1] - changes.times_s[0]
    counter_w = (changes.values[-1] - changes.values[0]) / elapsed_s
    # The reading taken at a change belongs to the time before it.
    instant_w = sum(powers_w[1:]) / (len(powers_w) - 1)
    difference_w = abs(counter_w - instant_w)
    if difference_w <= max(_CROSS_CHECK * instant_w, _CROSS_CHECK_W):
        return changes, []
    doubt = f"counter and instant power disagree: {counter_w:.1f} W against {instant_w:.1f} W"
    return changes, [doubt + " when the meter was opened"]


def _neighbour_notes(pids: tuple[int, ...]) -> tuple[str, ...]:
    if not pids:
        return ()
    listed = ", ".join(map(str, pids))
    return (f"other processes use this GPU and count into every reading (pids {listed})",)


def throttle_names(bits: int) -> tuple[str, ...]:
    """Names of the reasons in a mask of nvmlClocksEventReasons; unknown bits as numbers."""
    names = [name for bit, name in _THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(_THROTTLE_REASONS)
    return tuple(names + ([f"unknown_{unknown:#x}"] if unknown else []))


def _throttle_bits(nvml: Any, handle: Any) -> int:
    # The function was renamed in NVML 12; either name may be missing.
    bits = optional(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if bits is None:
        bits = optional(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return int(bits or 0)


def _number(nvml: Any, call: Callable[[], int]) -> float | None:
    value = optional(nvml, call)
    return None if value is None else float(value)


def _start(nvml: Any) -> None:
    with opening(nvml, "starting NVML"):
        nvml.nvmlInit()


def _stop(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def _import_pynvml() -> Any:
    """The module of nvidia-ml-py.

    Raises:
        MeterUnavailable: it is missing, broken, or another distribution's module of the same name.
    """
    try:
        import pynvml
    except Exception as exc:  # a broken module may raise anything; say what, and do not hide it
        raise MeterUnavailable(
            f"the module pynvml cannot be imported ({type(exc).__name__}: {exc}); "
            "pip install --force-reinstall nvidia-ml-py"
        ) from exc
    missing = [name for name in _NEEDED_NAMES if not hasattr(pynvml, name)]
    if missing:
        where = os.path.basename(getattr(pynvml, "__file__", None) or "pynvml")
        remove = " ".join(_installed_impostors()) or "pynvml"
        raise MeterUnavailable(
            f"the module pynvml ({where}) lacks {', '.join(missing)}: it is not the one of "
            f"nvidia-ml-py; pip uninstall -y {remove}, then "
            "pip install --force-reinstall nvidia-ml-py"
        )
    return pynvml


def _installed_impostors() -> list[str]:
    """Installed distributions that overwrite the module ``pynvml``."""
    found = []
    for name in _IMPOSTORS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            found.append(name)
    return found
