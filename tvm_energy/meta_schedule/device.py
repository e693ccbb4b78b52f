"""Devices that can be tuned for: an NVIDIA GPU, this CPU, or a simulated GPU.

``open_device("auto")`` takes an NVIDIA GPU whose energy NVML reads, else ``sim:a100``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from tvm_energy.errors import MeasurementError, MeterUnavailable
from tvm_energy.kernels.devices import (
    Artifact,
    LocalDevice,
    LocalHardware,
    MeterChoice,
    find_cpu,
    find_gpu,
    open_by_name,
)
from tvm_energy.kernels.history import History
from tvm_energy.kernels.workers import (
    ArgumentInfo,
    measure_exported,
    plain_reason,
    self_test_library,
    time_library,
)
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.self_test import SelfTest


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

    def start_workers(self) -> None:
        """Let the workers load TVM while this process prepares the search."""
        ...

    def use_meter(self, meter: MeterChoice) -> None:
        """Measure energy with another meter than the device's own."""
        ...

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

    def gpu(which: int | str | None) -> TuningDevice:
        hardware = find_gpu(which)
        own = _cuda_target(hardware.identity["name"]) if target is None else target
        return RealDevice(hardware, own)

    def cpu() -> TuningDevice:
        return RealDevice(find_cpu(), _cpu_target() if target is None else target)

    def simulated(name: str) -> TuningDevice:
        from tvm_energy.meta_schedule.simulated import SimulatedTuningDevice

        return SimulatedTuningDevice(name, target)

    return open_by_name(spec, gpu=gpu, cpu=cpu, simulated=simulated)


def _cpu_target() -> Any:
    import psutil
    import tvm

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return tvm.target.Target({"kind": "llvm", "num-cores": cores})


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


class RealDevice(LocalDevice):
    """A GPU or the CPU of this machine; kernels run in worker processes."""

    def __init__(self, hardware: LocalHardware, target: Any) -> None:
        import tvm

        from tvm_energy.meta_schedule.builder import PooledBuilder
        from tvm_energy.meta_schedule.runner import PooledRunner

        self.target = target if isinstance(target, tvm.target.Target) else tvm.target.Target(target)
        super().__init__(hardware, str(self.target))
        self.builder = PooledBuilder(self.build_pool, self.history)
        self.runner = PooledRunner(self.run_pool, self.history)

    def measure_exported(
        self, path: str, entry: str, arguments: Sequence[ArgumentInfo], plan: MeasurementPlan
    ) -> EnergyMeasurement | float:
        """Measure a function of an exported library; only its latency where there is no meter.

        Raises:
            MeasurementError: the library cannot be loaded or run; the message says why.
        """
        job = (path, entry, list(arguments), self.kind, self._meter_spec, plan)
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
        ((times_s, error),) = self.run_pool.map(
            time_library, [(artifact.path, self.kind, artifact.arguments)]
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
        job = (artifact.path, self.kind, artifact.arguments, spec, load_name, seconds)
        ((result, error),) = self._measure_pool.map(
            self_test_library, [(*job, str(self.identity["uuid"]))]
        )
        if result is None:
            raise MeasurementError(plain_reason(error))
        return SelfTest.from_json(result)

    def close(self) -> None:
        """See `TuningDevice.close`."""
        self.builder.core.close()
        super().close()
