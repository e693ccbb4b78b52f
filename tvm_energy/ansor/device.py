"""Devices that Ansor can be tuned for: an NVIDIA GPU, this CPU, or a simulated GPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tvm_energy.ansor.compat import load_auto_scheduler

# isort: split
import tvm

from tvm_energy.ansor.build import build_library, build_simulated
from tvm_energy.ansor.names import names_of
from tvm_energy.errors import ConfigurationError
from tvm_energy.kernels.devices import (
    Artifact,
    LocalDevice,
    LocalHardware,
    MeterChoice,
    SimulatedDevice,
    find_cpu,
    find_gpu,
    open_by_name,
)
from tvm_energy.kernels.history import History
from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.kernels.timing import KernelTimer
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.simulation.devices import find_device

#: What Ansor must know of a CUDA GPU that is not in this machine; the same numbers hold for every
#: GPU from sm_70 on, and are what its own look at such a GPU gives.
_GPU_PARAMETERS = {
    "num_cores": -1,
    "vector_unit_bytes": 16,
    "cache_line_bytes": 64,
    "max_shared_memory_per_block": 48 * 1024,
    "max_local_memory_per_block": 2**31 - 1,
    "max_threads_per_block": 1024,
    "max_vthread_extent": 8,
    "warp_size": 32,
}


class AnsorDevice(Protocol):
    """A device with all that tuning needs.

    Attributes:
        spec: as in ``device=``, in full: ``sim:a100``, ``cpu``, ``cuda:GPU-...``.
        identity: name, uuid, ..., as in log headers.
        meter: `MeterInfo` as JSON, or None when energy cannot be measured.
        no_meter_reason: why not.
        max_power_w: power limit, where known.
        target_kind: kind of the TVM targets that run on it: ``llvm`` or ``cuda``.
        artifacts: built kernels by (workload, key), until `forget` is called.
    """

    spec: str
    identity: dict[str, Any]
    meter: dict[str, Any] | None
    no_meter_reason: str
    max_power_w: float | None
    history: History
    target_kind: str
    artifacts: dict[tuple[str, str], Artifact]

    def start_workers(self) -> None:
        """Let the workers load TVM while this process prepares the search."""
        ...

    def build(self, inputs: Sequence[Any]) -> list[str | None]:
        """Build ``MeasureInput`` objects; the reason for each that failed."""
        ...

    def time(
        self, artifact: Artifact, *, number: int, repeat: int, min_repeat_ms: int, flush: bool
    ) -> tuple[list[float] | None, str | None]:
        """Seconds a launch, one number for each repeat, or the reason why there are none."""
        ...

    def use_meter(self, meter: MeterChoice) -> None:
        """Measure energy with another meter than the device's own."""
        ...

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """Measure kernels, interleaved when there are several; a reason where it failed."""
        ...

    def forget(self) -> None:
        """Remove the artifacts."""
        ...

    def close(self) -> None:
        """End workers, remove files."""
        ...


def open_device(spec: str = "auto", target: Any = None) -> AnsorDevice:
    """Open a device by name.

    Args:
        spec: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, a GPU's UUID, or ``sim:NAME``. ``auto`` follows the
            target: this CPU for ``llvm``, an NVIDIA GPU for ``cuda`` where there is one, else
            ``sim:a100``.
        target: TVM target of the tasks, for ``auto``.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: the GPU exists but cannot be used.
    """
    load_auto_scheduler()
    if spec == "auto" and target is not None and tvm.target.Target(target).kind.name == "llvm":
        spec = "cpu"

    def gpu(which: int | str | None) -> AnsorDevice:
        return _RealDevice(find_gpu(which), "cuda")

    def cpu() -> AnsorDevice:
        return _RealDevice(find_cpu(), "llvm")

    def simulated(name: str) -> AnsorDevice:
        return _SimulatedAnsorDevice(name)

    return open_by_name(spec, gpu=gpu, cpu=cpu, simulated=simulated)


def search_task(func: Any, args: Sequence[Any], *, device: str = "auto", **stock: Any) -> Any:
    """An Ansor ``SearchTask`` for a device by name, simulated GPUs included.

    Args:
        func, args: as for ``SearchTask``.
        device: see `open_device`. Without ``target``, its own target is used; Ansor looks at a GPU to
            learn its limits, and is told them where the GPU is simulated.
        stock: further arguments of ``SearchTask``.
    """
    auto_scheduler = load_auto_scheduler()
    if device.startswith("sim:"):
        stock.setdefault("hardware_params", auto_scheduler.HardwareParams(**_GPU_PARAMETERS))
        stock.setdefault("target", _cuda_target(device))
    else:
        stock.setdefault("target", "llvm" if device == "cpu" else "cuda")
    return auto_scheduler.SearchTask(func=func, args=args, **stock)


def _cuda_target(device: str) -> Any:
    """The target of a simulated GPU."""
    return tvm.target.Target(find_device(device.removeprefix("sim:")).target, host="llvm")


class _Builds:
    """Builds candidates in workers and keeps what was built."""

    def __init__(self, pool: WorkerPool, build: Callable[..., Any]) -> None:
        self._pool = pool
        self._build = build
        self._folder = tempfile.mkdtemp(prefix="tvm_energy_")
        self.artifacts: dict[tuple[str, str], Artifact] = {}

    def build(self, inputs: Sequence[Any]) -> list[str | None]:
        outcomes = self._pool.map(self._build, [(i.serialize(), self._folder) for i in inputs])
        for item, (built, _) in zip(inputs, outcomes, strict=True):
            if built is not None:
                path, arguments = built
                self.artifacts[names_of(item)] = Artifact(path=path, arguments=arguments)
        return [error for _, error in outcomes]

    def forget(self) -> None:
        for artifact in self.artifacts.values():
            shutil.rmtree(artifact.path.rpartition("/")[0], ignore_errors=True)
        self.artifacts.clear()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _RealDevice(LocalDevice):
    def __init__(self, hardware: LocalHardware, target_kind: str) -> None:
        super().__init__(hardware, target_kind)
        self.target_kind = target_kind
        self._builds = _Builds(self.build_pool, build_library)
        self._timer = KernelTimer(self.run_pool)
        self.artifacts = self._builds.artifacts
        self.build = self._builds.build
        self.forget = self._builds.forget

    def time(
        self, artifact: Artifact, *, number: int, repeat: int, min_repeat_ms: int, flush: bool
    ) -> tuple[list[float] | None, str | None]:
        return self._timer.time(
            artifact.path,
            self.kind,
            artifact.arguments,
            number=number,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms,
            # The name that stock Ansor uses.
            preprocess="cache_flush_cpu_non_first_arg" if flush else "",
        )

    def close(self) -> None:
        super().close()
        self._builds.close()


class _SimulatedAnsorDevice(SimulatedDevice):
    target_kind = "cuda"

    def __init__(self, spec: str) -> None:
        super().__init__(spec, str(_cuda_target(spec)))
        self._builds = _Builds(self.build_pool, build_simulated)
        self.artifacts = self._builds.artifacts
        self.build = self._builds.build
        self.forget = self._builds.forget

    def time(
        self, artifact: Artifact, *, number: int, repeat: int, min_repeat_ms: int, flush: bool
    ) -> tuple[list[float] | None, str | None]:
        return self.latency_s(artifact.path), None

    def close(self) -> None:
        super().close()
        self._builds.close()


def check_tasks(device: AnsorDevice, tasks: Mapping[str, Any]) -> None:
    """Refuse tasks that cannot run on the device.

    Raises:
        ConfigurationError: naming the task and what to change.
    """
    for task in tasks.values():
        kind = str(task.target.kind.name)
        name = task.desc or task.workload_key
        if kind != device.target_kind:
            raise ConfigurationError(
                f"task {name} is for target {kind!r}, but device {device.spec} runs "
                f"{device.target_kind!r}; give another device= or another target"
            )
        if len(task.task_input_names):
            raise ConfigurationError(
                f"task {name} brings its own input data (task_inputs), which is not supported: "
                "kernels are measured with random data"
            )
