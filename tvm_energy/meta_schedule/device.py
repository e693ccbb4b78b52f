"""Devices that can be tuned for: an NVIDIA GPU, this CPU, or a simulated GPU.

``open_device("auto")`` takes an NVIDIA GPU whose energy NVML reads, else ``sim:a100``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from tvm_energy.kernels.devices import (
    Artifact,
    LocalDevice,
    LocalHardware,
    find_cpu,
    find_gpu,
    open_by_name,
)
from tvm_energy.kernels.history import History
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan


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


def open_device(spec: str = "auto", target: Any = None) -> TuningDevice:
    """Open a device by name.

    Args:
        spec: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, a GPU's UUID, or ``sim:NAME``.
        target: TVM target to use instead of the device's own.

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

    def close(self) -> None:
        """See `TuningDevice.close`."""
        self.builder.core.close()
        super().close()
