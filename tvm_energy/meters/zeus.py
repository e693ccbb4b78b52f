"""AMD GPUs, Jetson boards and Apple silicon through the package Zeus (``pip install 'tvm-energy[zeus]'``).

Zeus (https://ml.energy/zeus, Apache-2.0) wraps amdsmi, the power monitors of Jetson boards and Apple's
IOReport. NVIDIA GPUs are better read by `tvm_energy.meters.nvml`, which needs no such layer. What is
called, as of Zeus 0.16::

    zeus.device.get_gpus()   len(), get_name(i), supports_get_total_energy_consumption(i),
                             get_total_energy_consumption(i) [mJ], get_instant_power_usage(i),
                             get_average_power_usage(i), get_power_management_limit(i) [mW],
                             get_gpu_temperature(i) [C]
    zeus.device.get_soc()    get_available_metrics(), get_total_energy_consumption() [mJ by rail]

A Jetson's counter is made by Zeus itself from power read ten times a second.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tvm_energy.errors import MeasurementError, MeterUnavailable, TvmEnergyError
from tvm_energy.meters.base import DeviceState, MeterInfo, Reading, TimeSource
from tvm_energy.meters.system_time import SystemTime
from tvm_energy.meters.update_period import watch_changes

__all__ = ["ZeusMeter", "open_zeus_meter"]

DeviceKind = Literal["gpu", "soc"]

_POLL_S = 2e-3
_WATCH_LIMIT_S = 1.5
_ASSUMED_PERIOD_S = 0.1
_COUNTER_STEP_J = 1e-3

#: Metrics of a system on a chip that are worth a meter, best first, and what they cover.
_SOC_METRICS = {"total_energy_mj": "module", "gpu_energy_mj": "gpu", "gpu_mj": "gpu"}

#: Zeus' errors after which trying again cannot help.
_PERMANENT = {
    "ZeusGPUInitError",
    "ZeusGPUNotSupportedError",
    "ZeusGPUNoPermissionError",
    "ZeusGPUNotFoundError",
    "ZeusGPUDriverNotLoadedError",
    "ZeusGPULibraryNotFoundError",
    "ZeusGPUFunctionNotFoundError",
    "ZeusGPULostError",
    "ZeusGPUResetRequiredError",
    "ZeusGPUOperatingSystemError",
    "ZeusGPULibRMVersionMismatchError",
    "ZeusSoCInitError",
}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One sensor behind Zeus: what it is, and how it is read (joules or watts)."""

    method: str
    scope: str
    name: str
    identity: str
    read: Callable[[], float]
    max_power_w: float | None = None
    temperature_c: Callable[[], float] | None = None
    notes: tuple[str, ...] = ()


class ZeusMeter:
    """One device that Zeus knows (see `tvm_energy.meters.base.PowerMeter`); made by `open_zeus_meter`."""

    def __init__(self, source: _Source, info: MeterInfo, time: TimeSource) -> None:
        self.info = info
        self.time = time
        self._source = source

    def read(self) -> Reading:
        """See `PowerMeter.read`; the time is the middle of the call."""
        before_s = self.time.now()
        value = _call(self._source.read, f"reading {self.info.device_name}")
        time_s = 0.5 * (before_s + self.time.now())
        if self.info.method == "counter":
            return Reading(time_s=time_s, energy_j=value)
        return Reading(time_s=time_s, power_w=value)

    def state(self) -> DeviceState:
        """See `PowerMeter.state`; Zeus tells the temperature of GPUs and no clocks."""
        if self._source.temperature_c is None:
            return DeviceState()
        return DeviceState(temperature_c=_optional(self._source.temperature_c))

    def close(self) -> None:
        """See `PowerMeter.close`; Zeus keeps its own handles until the process ends."""


def open_zeus_meter(
    kind: DeviceKind | None = None,
    index: int = 0,
    *,
    metric: str | None = None,
    devices: Any = None,
    time: TimeSource | None = None,
) -> ZeusMeter:
    """Open a device through Zeus; about a second passes while its updates are timed.

    Args:
        kind: ``gpu`` (AMD, or NVIDIA), ``soc`` (Jetson, Apple), or None for a GPU and, failing that, the
            system on a chip.
        index: which GPU, as Zeus counts: the HIP or CUDA index after the variables that hide devices.
        metric: energy of a system on a chip to be read, such as ``gpu_energy_mj``; None takes the total,
            else that of the GPU.
        devices: a module like ``zeus.device``; None imports it.
        time: the time source; None is real time.

    Raises:
        MeterUnavailable: Zeus is missing, or knows no such device; the message says what to do.
        MeasurementError: the device failed while its updates were timed.
        ValueError: unknown ``kind``, or a negative ``index``.
    """
    if kind not in (None, "gpu", "soc"):
        raise ValueError(f"kind must be 'gpu', 'soc' or None, got {kind!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    devices = _import_zeus() if devices is None else devices
    time = SystemTime() if time is None else time
    source = _find(devices, kind, index, metric)
    changes = watch_changes(
        lambda: _call(source.read, f"reading {source.name}"),
        time,
        poll_s=_POLL_S,
        limit_s=_WATCH_LIMIT_S,
    )
    notes = list(source.notes)
    if source.method == "counter" and not changes.times_s:
        raise MeterUnavailable(
            f"the energy of {source.name} does not move; update its driver, or ask Zeus for "
            "another metric"
        )
    period_s = changes.update_period_s
    if period_s is None:
        period_s = _ASSUMED_PERIOD_S
        notes.append(f"the update period could not be timed; {period_s:g} s is assumed")
    info = MeterInfo(
        meter="zeus",
        method=source.method,
        scope=source.scope,
        device_name=source.name,
        device_uuid=source.identity,
        update_period_s=max(period_s, _POLL_S),
        resolution_j=_COUNTER_STEP_J if source.method == "counter" else None,
        max_power_w=source.max_power_w,
        notes=tuple(notes),
    )
    return ZeusMeter(source, info, time)


def _find(devices: Any, kind: DeviceKind | None, index: int, metric: str | None) -> _Source:
    if kind == "gpu":
        return _gpu(devices, index)
    if kind == "soc":
        return _soc(devices, metric)
    try:
        return _gpu(devices, index)
    except MeterUnavailable as no_gpu:
        try:
            return _soc(devices, metric)
        except MeterUnavailable as no_soc:
            raise MeterUnavailable(f"Zeus finds nothing to measure: {no_gpu}; {no_soc}") from no_soc


def _gpu(devices: Any, index: int) -> _Source:
    gpus = _call(devices.get_gpus, "asking Zeus for GPUs")
    if index >= len(gpus):
        raise MeterUnavailable(
            f"Zeus knows {len(gpus)} GPU(s), so there is no GPU {index}; it counts from 0, after "
            "HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES"
        )
    name = str(_call(lambda: gpus.get_name(index), "asking Zeus for the name of the GPU"))
    limit_mw = _optional(lambda: gpus.get_power_management_limit(index))
    method, read_milli = _gpu_sensor(gpus, index, name)
    notes = () if method == "counter" else (f"no cumulative counter is used: {method}",)
    return _Source(
        method=method,
        scope="gpu",
        name=name,
        identity=f"zeus:{platform.node()}:gpu{index}",
        read=lambda: float(read_milli(index)) * 1e-3,
        max_power_w=limit_mw * 1e-3 if limit_mw else None,
        temperature_c=lambda: float(gpus.get_gpu_temperature(index)),
        notes=notes,
    )


def _gpu_sensor(gpus: Any, index: int, name: str) -> tuple[str, Callable[[int], Any]]:
    """The best sensor that answers, each tried and not assumed."""
    candidates = (
        ("counter", gpus.get_total_energy_consumption),
        ("power_integral", gpus.get_instant_power_usage),
        ("power_average", gpus.get_average_power_usage),
    )
    reasons = []
    for method, read in candidates:
        if method == "counter" and not _optional(
            lambda: gpus.supports_get_total_energy_consumption(index)
        ):
            reasons.append("no accurate energy counter")
            continue
        try:
            _call(lambda read=read: read(index), f"reading {name}")  # type: ignore[misc]
        except TvmEnergyError as exc:
            reasons.append(str(exc))
        else:
            return method, read
    raise MeterUnavailable(f"no energy or power of {name} can be read: {'; '.join(reasons)}")


def _soc(devices: Any, metric: str | None) -> _Source:
    soc = _call(devices.get_soc, "asking Zeus for a system on a chip")
    available = set(_call(soc.get_available_metrics, "asking Zeus for metrics"))
    wanted = [metric] if metric else [name for name in _SOC_METRICS if name in available]
    if not wanted or wanted[0] not in available:
        raise MeterUnavailable(
            f"{metric or 'no total and no GPU energy'} is not among the metrics of this chip: "
            f"{', '.join(sorted(available)) or 'none'}; choose one with metric="
        )
    chosen = str(wanted[0])

    def read_j() -> float:
        value = getattr(soc.get_total_energy_consumption(), chosen)
        if not isinstance(value, int | float):
            raise MeasurementError(f"Zeus gave {value!r} for {chosen}; choose another metric")
        return float(value) * 1e-3

    return _Source(
        method="counter",
        scope=_SOC_METRICS.get(chosen, chosen.removesuffix("_mj")),
        name=f"{type(soc).__name__} ({chosen})",
        identity=f"zeus:{platform.node()}:soc",
        read=read_j,
        notes=("everything that runs on the chip counts, other programs included",),
    )


def _call(function: Callable[[], Any], what: str) -> Any:
    """Call into Zeus; whatever it raises becomes an error of ours."""
    try:
        return function()
    except TvmEnergyError:
        raise
    except Exception as exc:  # Zeus passes on what amdsmi, queues and files raise
        name = type(exc).__name__
        text = f"{what} failed ({name}: {exc})"
        if name in _PERMANENT:
            raise MeterUnavailable(
                f"{text}; check the driver (rocm-smi, nvidia-smi), the permissions and that the "
                "device is passed to the container"
            ) from exc
        raise MeasurementError(f"{text}; try again, and check the driver if it stays") from exc


def _optional(function: Callable[[], Any]) -> Any:
    """The value of a query that not every device answers; None where it does not."""
    try:
        return function()
    except Exception:
        return None


def _import_zeus() -> Any:
    try:
        import zeus.device
    except Exception as exc:  # a broken driver binding may raise anything; say what
        raise MeterUnavailable(
            f"the package zeus cannot be imported ({type(exc).__name__}: {exc}); "
            "pip install 'tvm-energy[zeus]'"
        ) from exc
    return zeus.device
