"""What a device is to both tuners: its name, its workers, and how it measures energy.

The adapters add what their tuner needs: how a candidate is built, and how its time reaches the search.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tvm_energy.errors import ConfigurationError, MeasurementError, MeterUnavailable
from tvm_energy.kernels.history import History
from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.kernels.workers import (
    ArgumentInfo,
    describe_meter,
    measure_libraries,
    open_meter,
    plain_reason,
)
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meters.base import PowerMeter
from tvm_energy.protocol import measure, measure_interleaved
from tvm_energy.self_test import open_tested_meter
from tvm_energy.simulation.devices import DEVICES, find_device
from tvm_energy.simulation.kernel import KernelWork
from tvm_energy.simulation.load import SimulatedGpu
from tvm_energy.simulation.timeline import VirtualClock

logger = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 60.0
MEASURE_TIMEOUT_S = 180.0
DEFAULT_SIMULATED = "sim:a100"

#: Repeats of the simulated time evaluator, whose mean is a kernel's latency.
_LATENCY_REPEATS = 3

Device = TypeVar("Device")

#: Another meter than the device's own: a name (``nvml``, ``rapl``, ``zeus``), a meter, or a function without
#: arguments that opens one.
MeterChoice = str | PowerMeter | Callable[[], PowerMeter]

#: Which meters can be named for which kind of device.
_NAMED = {"cuda": ("nvml", "zeus"), "cpu": ("rapl",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A built kernel: its file, and the shapes and dtypes of its arguments."""

    path: str
    arguments: list[ArgumentInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHardware:
    """A GPU or the CPU of this machine, before any TVM target is chosen.

    Attributes:
        spec: in full: ``cpu``, ``cuda:GPU-...``.
        kind: ``cpu`` or ``cuda``, TVM's device type.
        identity: name, uuid, driver, as in log headers.
        meter: names the meter to workers (see `open_meter`), or None.
        meter_info: `MeterInfo` as JSON, or None.
        no_meter_reason: why there is no meter.
        max_power_w: power limit, where known.
        environment: set in workers before TVM is loaded.
    """

    spec: str
    kind: str
    identity: dict[str, Any]
    meter: dict[str, Any] | None
    meter_info: dict[str, Any] | None
    no_meter_reason: str = ""
    max_power_w: float | None = None
    environment: dict[str, str] | None = None


def open_by_name(
    spec: str,
    *,
    gpu: Callable[[int | str | None], Device],
    cpu: Callable[[], Device],
    simulated: Callable[[str], Device],
) -> Device:
    """Open a device by name.

    Args:
        spec: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, a GPU's UUID, or ``sim:NAME``. ``auto`` takes an
            NVIDIA GPU whose energy NVML reads, else ``sim:a100``.
        gpu, cpu, simulated: open a device of that kind.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: the GPU exists but cannot be used.
    """
    if spec == "auto":
        try:
            return gpu(None)
        except MeterUnavailable:
            return simulated(DEFAULT_SIMULATED)
    if spec == "cpu":
        return cpu()
    if spec.startswith("sim:"):
        return simulated(spec)
    if spec == "cuda" or spec.startswith(("cuda:", "GPU-", "MIG-")):
        name = spec.removeprefix("cuda").removeprefix(":")
        return gpu(int(name) if name.isdecimal() else name or None)
    raise ConfigurationError(
        f"unknown device {spec!r}; use auto, cpu, cuda, cuda:N, a GPU's UUID, "
        "or a simulated one: " + ", ".join(simulated_names())
    )


def simulated_names() -> list[str]:
    """``sim:a100`` and the others."""
    return [f"sim:{name}" for name in DEVICES]


def find_gpu(which: int | str | None, *, force: bool = False) -> LocalHardware:
    """A GPU by index or UUID, or the first.

    Args:
        which: index, UUID, or None.
        force: measure on a MIG GPU too.

    Raises:
        MeterUnavailable: there is none whose energy NVML reads.
    """
    from tvm_energy.meters.nvml_devices import cuda_name

    meter, tested = open_tested_meter(which, force=force)
    meter.close()
    info = meter.info
    for note in info.notes:
        logger.warning("%s: %s", info.device_name, note)
    return LocalHardware(
        spec=f"cuda:{info.device_uuid}",
        kind="cuda",
        identity={
            "name": info.device_name,
            "uuid": info.device_uuid,
            "driver": info.driver_version,
        },
        meter={
            "kind": "nvml",
            "uuid": info.device_uuid,
            "force": force,
            "field": None if tested is None else tested.field,
        },
        meter_info=info.to_json() | ({} if tested is None else {"self_test": tested.to_json()}),
        max_power_w=info.max_power_w,
        # CUDA and NVML may number GPUs differently; the UUID means the same to both.
        environment={"CUDA_VISIBLE_DEVICES": cuda_name(info.device_uuid, which, os.environ)},
    )


def find_cpu() -> LocalHardware:
    """This CPU, with its RAPL meter where that can be read."""
    import platform

    from tvm_energy.meters.rapl import open_rapl_meter

    info, reason = None, ""
    try:
        with contextlib.closing(open_rapl_meter()) as meter:
            info = meter.info.to_json()
    except MeterUnavailable as exc:
        reason = str(exc)
    return LocalHardware(
        spec="cpu",
        kind="cpu",
        identity={"name": _cpu_name(), "uuid": f"cpu:{platform.node()}", "driver": None},
        meter={"kind": "rapl"} if info else None,
        meter_info=info,
        no_meter_reason=reason,
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


class LocalDevice:
    """Hardware of this machine with its worker processes, in which all kernels run.

    A kernel that crashes or hangs takes its worker down, which is replaced.
    """

    def __init__(self, hardware: LocalHardware, target: str) -> None:
        self.spec = hardware.spec
        self.identity = {**hardware.identity, "simulated": False, "target": target}
        self.meter = hardware.meter_info
        self.no_meter_reason = hardware.no_meter_reason
        self.max_power_w = hardware.max_power_w
        self.history = History()
        self.kind = hardware.kind
        self._meter_spec = hardware.meter
        environment = hardware.environment
        self.build_pool = WorkerPool(os.cpu_count() or 1, BUILD_TIMEOUT_S, environment)
        self.run_pool = WorkerPool(1, RUN_TIMEOUT_S, environment)
        self._measure_pool = WorkerPool(1, MEASURE_TIMEOUT_S, environment)

    def start_workers(self) -> None:
        """Let the workers load TVM while this process prepares the search."""
        self.build_pool.start()
        self.run_pool.start()

    def use_meter(self, meter: MeterChoice) -> None:
        """Measure energy with another meter than the device's own.

        Kernels run in a worker process, and so does the meter: a meter or function is sent there, and
        a new copy is opened and closed for each measurement.

        Raises:
            ConfigurationError: no meter of that name measures this kind of device, or it is simulated.
            MeterUnavailable: it cannot be opened there.
        """
        spec: dict[str, Any] = {"kind": "given", "meter": meter}
        if isinstance(meter, str):
            if meter not in _NAMED[self.kind]:
                raise ConfigurationError(
                    f"no meter {meter!r} measures {self.spec}; use {' or '.join(_NAMED[self.kind])}, "
                    "or give a meter (see docs/extending.md)"
                )
            if self._meter_spec is not None and self._meter_spec["kind"] == meter:
                return  # the device's own, of which the best sensor is known
            spec = {"kind": meter}
        ((info, error),) = self._measure_pool.map(describe_meter, [(spec,)])
        if info is None:
            raise MeterUnavailable(
                f"the meter cannot be opened in the process in which kernels run: {plain_reason(error)}"
            )
        _check_meter(info, self.spec, simulated=False)
        self.meter, self.no_meter_reason, self._meter_spec = info, "", spec
        self.max_power_w = info["max_power_w"] or self.max_power_w

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """Measure kernels, interleaved when there are several; a reason where it failed."""
        if self._meter_spec is None:
            raise MeterUnavailable(f"no energy meter on {self.spec}: {self.no_meter_reason}")
        jobs = [(artifact.path, artifact.arguments) for artifact in artifacts]
        arguments = (self.kind, self._meter_spec, plan, str(self.identity["uuid"]))
        ((results, error),) = self._measure_pool.map(measure_libraries, [(jobs, *arguments)])
        if results is not None:
            return [
                item if isinstance(item, str) else EnergyMeasurement.from_json(item)
                for item in results
            ]
        if len(jobs) == 1:
            return [str(error)]
        # One of several kernels took the worker down: measure them one by one.
        return [self.measure([artifact], plan)[0] for artifact in artifacts]

    def close(self) -> None:
        """End the workers."""
        for pool in (self.build_pool, self.run_pool, self._measure_pool):
            pool.close()


class SimulatedDevice:
    """``sim:a100`` and its kin: artifacts are kernel descriptions, and time is virtual."""

    no_meter_reason = ""

    def __init__(self, spec: str, target: str, seed: int = 0) -> None:
        from tvm_energy.meters.nvml import open_nvml_meter

        self.spec = spec
        self.gpu = SimulatedGpu(
            find_device(spec.removeprefix("sim:")), clock=VirtualClock(), seed=seed
        )
        self._meter: PowerMeter = open_nvml_meter(nvml=self.gpu.nvml(), time=self.gpu.clock)
        info = self._meter.info
        self.identity = {
            "name": info.device_name,
            "uuid": spec,
            "driver": info.driver_version,
            "simulated": True,
            "target": target,
        }
        self.meter: dict[str, Any] | None = info.to_json()
        self.max_power_w = info.max_power_w
        self.history = History()
        self.build_pool = WorkerPool(os.cpu_count() or 1, BUILD_TIMEOUT_S)

    def start_workers(self) -> None:
        """See `LocalDevice.start_workers`."""
        self.build_pool.start()

    def use_meter(self, meter: MeterChoice) -> None:
        """See `LocalDevice.use_meter`; the meter is used in this process, and reads `gpu` in virtual time.

        Raises:
            ConfigurationError: it is a name, or a meter of something real.
        """
        if isinstance(meter, str):
            raise ConfigurationError(
                f"meter {meter!r} cannot measure {self.spec}, which has a simulated sensor of its own; "
                "leave meter= out"
            )
        opened = open_meter({"kind": "given", "meter": meter})
        info = opened.info.to_json()
        _check_meter(info, self.spec, simulated=True)
        self._meter.close()
        self._meter, self.meter = opened, info
        self.max_power_w = info["max_power_w"] or self.max_power_w

    def latency_s(self, path: str) -> list[float]:
        """Simulated run times of an artifact, as a time evaluator would repeat them."""
        return [float(value) for value in self.gpu.latency(read_work(path), _LATENCY_REPEATS)]

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """See `LocalDevice.measure`; takes virtual time only."""
        loads = [self.gpu.load(read_work(artifact.path)) for artifact in artifacts]
        if len(loads) > 1:
            results = measure_interleaved(loads, self._meter, plan)
            return [r if isinstance(r, EnergyMeasurement) else str(r) for r in results]
        try:
            return [measure(loads[0], self._meter, plan)]
        except MeasurementError as exc:
            return [str(exc)]

    def close(self) -> None:
        """End the workers."""
        self.build_pool.close()
        self._meter.close()


def _check_meter(info: dict[str, Any], device: str, *, simulated: bool) -> None:
    """A simulated number must not pass for a real one, nor the reverse."""
    if bool(info["simulated"]) != simulated:
        kinds = ("real", "simulated")
        raise ConfigurationError(
            f"meter {info['meter']!r} of {info['device_name']} is {kinds[not simulated]}, but device "
            f"{device} is {kinds[simulated]}; give another meter= or device="
        )


def read_work(path: str) -> KernelWork:
    """The kernel description in an artifact."""
    return KernelWork.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def write_work(work: KernelWork, path: str) -> None:
    """Make a kernel description the artifact."""
    Path(path).write_text(json.dumps(work.to_json()), encoding="utf-8")
