"""Which GPUs there are, and which one is meant.

CUDA and NVML number GPUs differently: CUDA by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID and after
CUDA_VISIBLE_DEVICES, NVML always by PCI bus and all of them. Only a UUID means the same to both.

CUDA_VISIBLE_DEVICES is read as CUDA reads it (CUDA programming guide, "CUDA environment variables"): numbers, UUIDs or
unambiguous beginnings of them, ``MIG-<uuid>`` or the older ``MIG-GPU-<uuid>/<gi>/<ci>``, with
commas between; everything from the first invalid entry on is ignored; empty or -1 hides every GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.nvml_errors import code_of, errors_of, explain
from tvm_energy.meters.nvml_sensors import supported_sensors

T = TypeVar("T")

#: Set in worker processes: what their parent has started belongs to the same run.
WORKER_VARIABLE = "TVM_ENERGY_WORKER"

#: Belongs to every measurement of a divided GPU.
MIG_NOTE = "MIG is enabled: energy is that of the whole GPU, with all its instances (forced)"

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: First entries that hide every GPU; Slurm and SGE set the last for a job without a GPU.
_HIDE_ALL = ("", "-1", "NoDevFiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU as NVML sees it.

    Attributes:
        index: NVML's number (the one that nvidia-smi shows).
        uuid: ``GPU-...``, the same for CUDA; empty where the GPU does not answer.
        name: product name.
        driver_version: version of the driver.
        mig_enabled: the GPU is divided into MIG instances.
        mig_instances: their UUIDs.
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
    mig_instances: tuple[str, ...] = ()
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
        mig_instances=_mig_instances(nvml, handle) if mig else (),
        processes=other_processes(nvml, handle),
        sensors=sensors,
        power_limit_w=power_limit_w(nvml, handle),
        problem=problem,
    )


def choose(
    gpus: Sequence[GpuInfo],
    uuid_or_index: str | int | None,
    environ: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> tuple[GpuInfo, tuple[str, ...]]:
    """The GPU that is meant, and notes on the choice.

    Args:
        gpus: all GPUs, in NVML's order.
        uuid_or_index: a UUID (or an unambiguous beginning of one), NVML's index, or None for the
            GPU that CUDA would call device 0.
        environ: environment variables; None is this process's.
        force: for a MIG instance take the GPU that it is a part of.

    Raises:
        MeterUnavailable: no GPU, no such GPU, or a part of a GPU (MIG) without ``force``.
    """
    if not gpus:
        raise MeterUnavailable("NVML knows no GPU; check that nvidia-smi -L lists one")
    environ = os.environ if environ is None else environ
    if uuid_or_index is None:
        return visible_gpus(gpus, environ, force=force)[0], _order_notes(gpus, environ)
    if isinstance(uuid_or_index, int):
        gpu = _by_index(gpus, uuid_or_index)
    else:
        gpu = _by_uuid(gpus, uuid_or_index, force)
    return gpu, _hidden_notes(gpus, gpu, environ)


def visible_gpus(
    gpus: Sequence[GpuInfo], environ: Mapping[str, str] | None = None, *, force: bool = False
) -> list[GpuInfo]:
    """The GPUs that CUDA would show to a program, in its order, each once.

    Raises:
        MeterUnavailable: CUDA_VISIBLE_DEVICES hides every GPU, or shows a MIG instance first and
            not ``force``.
    """
    environ = os.environ if environ is None else environ
    value = environ.get(_VISIBLE)
    if value is None:
        return list(gpus)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0] in _HIDE_ALL:
        raise MeterUnavailable(f"{_VISIBLE}={value!r} hides every GPU; unset it or name one")
    found: dict[str, GpuInfo] = {}
    for entry in entries:
        try:
            gpu = _by_index(gpus, int(entry)) if entry.isdecimal() else _by_uuid(gpus, entry, force)
        except MeterUnavailable as exc:
            if found:
                break  # as CUDA does
            raise MeterUnavailable(f"{_VISIBLE}={value!r}: {exc}") from None
        found.setdefault(gpu.uuid, gpu)
    return list(found.values())


def cuda_name(uuid: str, wanted: str | int | None, environ: Mapping[str, str]) -> str:
    """What to call the chosen GPU in CUDA_VISIBLE_DEVICES: its UUID, or the MIG instance asked for."""
    name = environ.get(_VISIBLE, "").split(",")[0].strip() if wanted is None else str(wanted)
    return name if name.upper().startswith("MIG-") else uuid


def _hidden_notes(
    gpus: Sequence[GpuInfo], gpu: GpuInfo, environ: Mapping[str, str]
) -> tuple[str, ...]:
    try:
        hidden = gpu not in visible_gpus(gpus, environ, force=True)
    except MeterUnavailable:
        hidden = True
    if not hidden:
        return ()
    return (f"{_VISIBLE}={environ[_VISIBLE]!r} hides this GPU from CUDA programs",)


def _order_notes(gpus: Sequence[GpuInfo], environ: Mapping[str, str]) -> tuple[str, ...]:
    first = environ.get(_VISIBLE, "0").split(",")[0].strip()
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not first.isdecimal() or by_bus or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        "GPUs of different kinds: CUDA may number them differently from NVML; name the GPU by "
        "UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )


def _by_index(gpus: Sequence[GpuInfo], index: int) -> GpuInfo:
    if not 0 <= index < len(gpus):
        raise MeterUnavailable(f"there is no GPU {index}; {_known(gpus)}")
    return gpus[index]


def _by_uuid(gpus: Sequence[GpuInfo], uuid: str, force: bool) -> GpuInfo:
    if uuid.upper().startswith("MIG-"):
        return _whole_of(gpus, uuid, force)
    found = [gpu for gpu in gpus if uuid and gpu.uuid.lower().startswith(uuid.lower())]
    exact = [gpu for gpu in found if gpu.uuid.lower() == uuid.lower()]
    found = exact or found
    if len(found) != 1:
        trouble = "is ambiguous" if found else "is not the UUID of a GPU here"
        raise MeterUnavailable(f"{uuid!r} {trouble}; {_known(gpus)}")
    return found[0]


def _whole_of(gpus: Sequence[GpuInfo], instance: str, force: bool) -> GpuInfo:
    """The GPU that a MIG instance is a part of."""
    if not force:
        raise MeterUnavailable(
            f"{instance} is a MIG instance: power, energy and clocks belong to the whole GPU, so its "
            "share cannot be measured; disable MIG, use another GPU, or take the numbers of the "
            "whole GPU with --force"
        )
    older = re.fullmatch(r"MIG-(GPU-[^/]+)/\d+/\d+", instance, re.IGNORECASE)
    if older:
        return _by_uuid(gpus, older[1], force)
    found = [
        gpu
        for gpu in gpus
        if any(own.lower().startswith(instance.lower()) for own in gpu.mig_instances)
    ]
    if len(found) != 1:
        trouble = "is ambiguous" if found else "is not a MIG instance here"
        raise MeterUnavailable(f"{instance!r} {trouble}; nvidia-smi -L lists those that exist")
    return found[0]


def _known(gpus: Sequence[GpuInfo]) -> str:
    return "known are " + ", ".join(f"{gpu.index}: {gpu.uuid} ({gpu.name})" for gpu in gpus)


def mig_problem(name: str) -> str:
    """Why a divided GPU is refused."""
    return (
        f"MIG is enabled on {name}: power and energy are those of the whole GPU, shared by all "
        "instances; disable MIG (nvidia-smi -mig 0, as administrator), use another GPU, or take the "
        "numbers of the whole GPU with --force"
    )


def is_mig_enabled(nvml: Any, handle: Any) -> bool:
    """Whether the GPU is divided; False where it cannot be."""
    mode = optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    return bool(mode and mode[0])


def power_limit_w(nvml: Any, handle: Any) -> float | None:
    """Enforced power limit; None where it is not told."""
    limit_mw = optional(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return None if limit_mw is None else limit_mw * 1e-3


def _mig_instances(nvml: Any, handle: Any) -> tuple[str, ...]:
    def uuid_of(index: int) -> str:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))

    count = optional(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    found = (optional(nvml, partial(uuid_of, index)) for index in range(count))
    return tuple(uuid for uuid in found if uuid)


def other_processes(nvml: Any, handle: Any) -> tuple[int, ...]:
    """Pids of compute processes of others on the GPU.

    Ours are this process, its parent, and what they have started: in a worker of a tuning run also
    the sibling that times kernels.
    """
    found = optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    pids = {int(process.pid) for process in found}
    return tuple(sorted(pids - _own_processes(pids)))


def _own_processes(pids: set[int]) -> set[int]:
    family = {os.getpid()}
    if os.environ.get(WORKER_VARIABLE):
        family.add(os.getppid())
    return {pid for pid in pids if pid == os.getppid() or family & set(_ancestry(pid))}


def _ancestry(pid: int) -> Iterator[int]:
    """A process, its parent, and so on, as far as /proc tells."""
    for _ in range(64):
        yield pid
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            # The name stands in brackets and may hold anything; the parent is the second word after it.
            pid = int(status.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 1:
            return


def optional(nvml: Any, call: Callable[[], T]) -> T | None:
    """The value of a query that not every GPU, driver or binding knows; None where it fails."""
    try:
        return call()
    except errors_of(nvml, AttributeError):
        return None
