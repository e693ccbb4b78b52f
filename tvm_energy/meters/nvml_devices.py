"""Which GPUs there are, and which one is meant.

CUDA and NVML number GPUs differently: CUDA by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID and after
CUDA_VISIBLE_DEVICES, NVML always by PCI bus and all of them. Only a UUID means the same to both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.nvml_errors import code_of, errors_of, explain
from tvm_energy.meters.nvml_sensors import supported_sensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU as NVML sees it.

    Attributes:
        index: NVML's number (the one that nvidia-smi shows).
        uuid: ``GPU-...``, the same for CUDA; empty where the GPU does not answer.
        name: product name.
        driver_version: version of the driver.
        mig_enabled: the GPU is divided into MIG instances.
        processes: pids of compute processes of others; they count into every reading.
        sensors: titles of the sensors that answer, best first.
        power_limit_w: enforced power limit; None where it is not told.
        problem: why this GPU cannot be measured; None if it can.
    """

    index: int
    uuid: str
    name: str
    driver_version: str | None
    mig_enabled: bool = False
    processes: tuple[int, ...] = ()
    sensors: tuple[str, ...] = ()
    power_limit_w: float | None = None
    problem: str | None = None


def describe_all(nvml: Any) -> list[GpuInfo]:
    """Every GPU; one that does not answer is listed with its problem.

    Raises:
        nvml.NVMLError: the GPUs cannot even be counted.
    """
    driver = optional(nvml, nvml.nvmlSystemGetDriverVersion)
    return [_describe(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount())]


def _describe(nvml: Any, index: int, driver: str | None) -> GpuInfo:
    uuid = name = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        sensors = tuple(sensor.title for sensor in supported_sensors(nvml, handle, name))
    except errors_of(nvml) as exc:
        code = code_of(exc)
        return GpuInfo(
            index=index,
            uuid=uuid,
            name=name or f"GPU {index}",
            driver_version=driver,
            problem=f"NVML error {code}: {explain(code)}",
        )
    mig = is_mig_enabled(nvml, handle)
    problem = mig_problem(name) if mig else None
    if not sensors:
        problem = (
            "no energy counter and no power sensor answers; update the driver, or on a Jetson measure "
            "through Zeus (tvm_energy.meters.zeus; pip install 'tvm-energy[zeus]')"
        )
    return GpuInfo(
        index=index,
        uuid=uuid,
        name=name,
        driver_version=driver,
        mig_enabled=mig,
        processes=other_processes(nvml, handle),
        sensors=sensors,
        power_limit_w=power_limit_w(nvml, handle),
        problem=problem,
    )


def choose(
    gpus: Sequence[GpuInfo],
    uuid_or_index: str | int | None,
    environ: Mapping[str, str] | None = None,
) -> tuple[GpuInfo, tuple[str, ...]]:
    """The GPU that is meant, and notes on the choice.

    Args:
        gpus: all GPUs, in NVML's order.
        uuid_or_index: a UUID (or an unambiguous beginning of one), NVML's index, or None for the
            GPU that CUDA would call device 0.
        environ: environment variables; None is this process's.

    Raises:
        MeterUnavailable: no GPU, no such GPU, or a part of a GPU (MIG).
    """
    if not gpus:
        raise MeterUnavailable("NVML knows no GPU; check that nvidia-smi -L lists one")
    if uuid_or_index is None:
        return _first_visible(gpus, os.environ if environ is None else environ)
    if isinstance(uuid_or_index, int):
        return _by_index(gpus, uuid_or_index), ()
    return _by_uuid(gpus, uuid_or_index), ()


def _first_visible(
    gpus: Sequence[GpuInfo], environ: Mapping[str, str]
) -> tuple[GpuInfo, tuple[str, ...]]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        # CUDA ignores everything from the first invalid entry on; -1 and "" hide all.
        if first in ("", "-1"):
            raise MeterUnavailable(
                f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it or name one"
            )
        if not first.isdecimal():
            return _by_uuid(gpus, first), ()
    index = int(first) if visible is not None else 0
    return _by_index(gpus, index), _order_notes(gpus, environ)


def _order_notes(gpus: Sequence[GpuInfo], environ: Mapping[str, str]) -> tuple[str, ...]:
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        "GPUs of different kinds: CUDA may number them differently from NVML; name the GPU by "
        "UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )


def _by_index(gpus: Sequence[GpuInfo], index: int) -> GpuInfo:
    if not 0 <= index < len(gpus):
        raise MeterUnavailable(f"there is no GPU {index}; {_known(gpus)}")
    return gpus[index]


def _by_uuid(gpus: Sequence[GpuInfo], uuid: str) -> GpuInfo:
    if uuid.upper().startswith("MIG-"):
        raise MeterUnavailable(
            f"{uuid} is a MIG instance: power, energy and clocks belong to the whole GPU, so its "
            "share cannot be measured; disable MIG or use another GPU"
        )
    found = [gpu for gpu in gpus if uuid and gpu.uuid.lower().startswith(uuid.lower())]
    if len(found) != 1:
        trouble = "is ambiguous" if found else "is not the UUID of a GPU here"
        raise MeterUnavailable(f"{uuid!r} {trouble}; {_known(gpus)}")
    return found[0]


def _known(gpus: Sequence[GpuInfo]) -> str:
    return "known are " + ", ".join(f"{gpu.index}: {gpu.uuid} ({gpu.name})" for gpu in gpus)


def mig_problem(name: str) -> str:
    """Why a divided GPU is refused."""
    return (
        f"MIG is enabled on {name}: power and energy are those of the whole GPU, shared by all "
        "instances; disable MIG (nvidia-smi -mig 0, as administrator) or use another GPU"
    )


def is_mig_enabled(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is divided; False where it cannot be."""
    mode = optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    return bool(mode and mode[0])


def power_limit_w(nvml: Any, handle: Any) -> float | None:
    """Enforced power limit; None where it is not told."""
    limit_mw = optional(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return None if limit_mw is None else limit_mw * 1e-3


def other_processes(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Pids of compute processes on the GPU, without this process and its parent."""
    found = optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    ours = {os.getpid(), os.getppid()}
    return tuple(sorted({process.pid for process in found} - ours))


def optional(nvml: Any, call: Callable[[], T]) -> T | None:
    """The value of a query that not every GPU, driver or binding knows; None where it fails."""
    try:
        return call()
    except errors_of(nvml, AttributeError):
        return None
