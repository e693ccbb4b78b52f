"""Devices that can be tuned for: an NVIDIA GPU, this CPU, or a simulated GPU.

``open_device("auto")`` takes an NVIDIA GPU whose energy NVML reads, else ``sim:a100``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tvm_energy.errors import ConfigurationError, MeasurementError, MeterUnavailable
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.history import History
from tvm_energy.meta_schedule.workers import (
    ArgumentInfo,
    measure_exported,
    measure_libraries,
    plain_reason,
    self_test_library,
    time_library,
)
from tvm_energy.self_test import SelfTest, open_tested_meter

logger = logging.getLogger(__name__)

MEASURE_TIMEOUT_S = 180.0
DEFAULT_SIMULATED = "sim:a100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A built kernel: its file, and the shapes and dtypes of its arguments."""

    path: str
    arguments: list[ArgumentInfo]


class TuningDevice(Protocol):
    """A device with all that tuning needs.

    Attributes:
        spec: as in ``--device``, in full: ``sim:a100``, ``cpu``, ``cuda:GPU-...``.
        target: TVM's target.
        identity: name, uuid, ..., as in log headers.
        meter: `MeterInfo` as JSON, or None when energy cannot be measured.
        no_meter_reason: why not.
        max_power_w: power limit, where known.
        history: what earlier runs tried.
        builder, runner: for MetaSchedule.
    """

    spec: str
    target: Any
    identity: dict[str, Any]
    meter: dict[str, Any] | None
    no_meter_reason: str
    max_power_w: float | None
    history: History
    builder: Any
    runner: Any

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """Measure kernels, interleaved when there are several; a reason where it failed."""
        ...

    def close(self) -> None:
        """End workers, remove files."""
        ...


def open_device(spec: str = "auto", target: Any = None, *, force: bool = False) -> TuningDevice:
    """Open a device by name.

    Args:
        spec: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, a GPU's UUID, or ``sim:NAME``.
        target: TVM target to use instead of the device's own.
        force: use a GPU that is divided by MIG; its energy is that of the whole GPU.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: the GPU exists but cannot be used.
    """
    if spec == "auto":
        try:
            return _open_gpu(None, target, force)
        except MeterUnavailable:
            return open_device(DEFAULT_SIMULATED, target)
    if spec == "cpu":
        return _open_cpu(target)
    if spec.startswith("sim:"):
        from tvm_energy.meta_schedule.simulated import SimulatedDevice

        return SimulatedDevice(spec, target)
    if spec == "cuda" or spec.startswith(("cuda:", "GPU-", "MIG-")):
        name = spec.removeprefix("cuda").removeprefix(":")
        return _open_gpu(int(name) if name.isdecimal() else name or None, target, force)
    raise ConfigurationError(
        f"unknown device {spec!r}; use auto, cpu, cuda, cuda:N, a GPU's UUID, "
        "or a simulated one: " + ", ".join(simulated_names())
    )


def simulated_names() -> list[str]:
    """``sim:a100`` and the others."""
    from tvm_energy.simulation.devices import DEVICES

    return [f"sim:{name}" for name in DEVICES]


def _open_gpu(which: int | str | None, target: Any, force: bool) -> TuningDevice:
    from tvm_energy.meters.nvml_devices import cuda_name

    meter, tested = open_tested_meter(which, force=force)
    meter.close()
    info = meter.info
    for note in info.notes:
        logger.warning("%s: %s", info.device_name, note)
    return RealDevice(
        spec=f"cuda:{info.device_uuid}",
        kind="cuda",
        target=_cuda_target(info.device_name) if target is None else target,
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


def _open_cpu(target: Any) -> TuningDevice:
    import platform

    import psutil
    import tvm

    from tvm_energy.meters.rapl import open_rapl_meter

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    info, reason = None, ""
    try:
        with contextlib.closing(open_rapl_meter()) as meter:
            info = meter.info.to_json()
    except MeterUnavailable as exc:
        reason = str(exc)
    return RealDevice(
        spec="cpu",
        kind="cpu",
        target=tvm.target.Target({"kind": "llvm", "num-cores": cores})
        if target is None
        else target,
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


def _cuda_target(device_name: str) -> Any:
    """TVM's own tag for well-known boards, else the attributes of the GPU as the runtime sees it."""
    import tvm

    tags = {
        "A100": "nvidia/nvidia-a100",
        "H100": "nvidia/nvidia-h100",
        "4090": "nvidia/geforce-rtx-4090",
    }
    for part, tag in tags.items():
        if part in device_name:
            return tvm.target.Target(tag)
    return tvm.target.Target.from_device(tvm.cuda(0))


class RealDevice:
    """A GPU or the CPU of this machine; kernels run in worker processes."""

    def __init__(
        self,
        *,
        spec: str,
        kind: str,
        target: Any,
        identity: dict[str, Any],
        meter: dict[str, Any] | None,
        meter_info: dict[str, Any] | None,
        no_meter_reason: str = "",
        max_power_w: float | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        import tvm

        from tvm_energy.meta_schedule.builder import BUILD_TIMEOUT_S, PooledBuilder
        from tvm_energy.meta_schedule.pool import WorkerPool
        from tvm_energy.meta_schedule.runner import RUN_TIMEOUT_S, PooledRunner

        self.spec = spec
        self.target = target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)
        self.identity = {**identity, "simulated": False, "target": str(self.target)}
        self.meter = meter_info
        self.no_meter_reason = no_meter_reason
        self.max_power_w = max_power_w
        self.history = History()
        self._kind = kind
        self._meter_spec = meter
        self._build_pool = WorkerPool(os.cpu_count() or 1, BUILD_TIMEOUT_S, environment)
        self._run_pool = WorkerPool(1, RUN_TIMEOUT_S, environment)
        self._measure_pool = WorkerPool(1, MEASURE_TIMEOUT_S, environment)
        self.builder = PooledBuilder(self._build_pool, self.history)
        self.runner = PooledRunner(self._run_pool, self.history)

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """See `TuningDevice.measure`."""
        if self._meter_spec is None:
            raise MeterUnavailable(f"no energy meter on {self.spec}: {self.no_meter_reason}")
        jobs = [(artifact.path, artifact.arguments) for artifact in artifacts]
        arguments = (self._kind, self._meter_spec, plan, str(self.identity["uuid"]))
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

    def measure_exported(
        self, path: str, entry: str, arguments: Sequence[ArgumentInfo], plan: MeasurementPlan
    ) -> EnergyMeasurement | float:
        """Measure a function of an exported library; only its latency where there is no meter.

        Raises:
            MeasurementError: the library cannot be loaded or run; the message says why.
        """
        job = (path, entry, list(arguments), self._kind, self._meter_spec, plan)
        ((result, error),) = self._measure_pool.map(
            measure_exported, [(*job, str(self.identity["uuid"]))]
        )
        if result is None:
            raise MeasurementError(plain_reason(error))
        if "energy_j" in result:
            return EnergyMeasurement.from_json(result)
        return float(result["latency_s"])

    def latency(self, artifact: Artifact) -> float:
        """Seconds a launch of a built kernel, without energy.

        Raises:
            MeasurementError: the kernel cannot be run; the message says why.
        """
        ((times_s, error),) = self._run_pool.map(
            time_library, [(artifact.path, self._kind, artifact.arguments)]
        )
        if times_s is None:
            raise MeasurementError(plain_reason(error))
        return sum(times_s) / len(times_s)

    def self_test(self, artifact: Artifact, load_name: str, seconds: float) -> SelfTest:
        """Compare the sensors of the device while that kernel runs.

        Raises:
            MeasurementError: the kernel cannot be run; the message says why.
            MeterUnavailable: the device has no energy meter.
        """
        if self._meter_spec is None:
            raise MeterUnavailable(self.no_meter_reason)
        spec = {key: value for key, value in self._meter_spec.items() if key != "field"}
        job = (artifact.path, self._kind, artifact.arguments, spec, load_name, seconds)
        ((result, error),) = self._measure_pool.map(
            self_test_library, [(*job, str(self.identity["uuid"]))]
        )
        if result is None:
            raise MeasurementError(plain_reason(error))
        return SelfTest.from_json(result)

    def close(self) -> None:
        """See `TuningDevice.close`."""
        self.builder.core.close()
        for pool in (self._build_pool, self._run_pool, self._measure_pool):
            pool.close()
