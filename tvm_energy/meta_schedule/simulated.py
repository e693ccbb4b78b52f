"""A simulated GPU behind the same interfaces: TVM's real search space and code, a simulated device."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture

from tvm_energy.errors import MeasurementError
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.builder import BUILD_TIMEOUT_S, PooledBuilder
from tvm_energy.meta_schedule.device import Artifact
from tvm_energy.meta_schedule.history import History
from tvm_energy.meta_schedule.pool import WorkerPool
from tvm_energy.meta_schedule.runner import finished
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.protocol import measure, measure_interleaved
from tvm_energy.simulation.devices import find_device
from tvm_energy.simulation.kernel import KernelWork
from tvm_energy.simulation.load import SimulatedGpu
from tvm_energy.simulation.timeline import VirtualClock

#: Repeats of the simulated time evaluator, whose mean is a kernel's latency.
_LATENCY_REPEATS = 3


def build_simulated(mod: Any, target: Any, folder: str) -> str:
    """In a worker: describe what the scheduled kernel would do on a GPU, as a JSON file."""
    from tvm_energy.meta_schedule.kernel_description import describe_kernel

    work = describe_kernel(mod, target)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "kernel.json")
    Path(path).write_text(json.dumps(work.to_json()), encoding="utf-8")
    return path


class SimulatedDevice:
    """``sim:a100`` and its kin; see `TuningDevice`."""

    no_meter_reason = ""

    def __init__(self, spec: str, target: Any = None, seed: int = 0) -> None:
        import tvm

        self.spec = spec
        device = find_device(spec.removeprefix("sim:"))
        self.target = tvm.target.Target(device.target if target is None else target)
        self.gpu = SimulatedGpu(device, clock=VirtualClock(), seed=seed)
        self._nvml_meter = open_nvml_meter(nvml=self.gpu.nvml(), time=self.gpu.clock)
        info = self._nvml_meter.info
        self.identity = {
            "name": info.device_name,
            "uuid": spec,
            "driver": info.driver_version,
            "simulated": True,
            "target": str(self.target),
        }
        self.meter: dict[str, Any] | None = info.to_json()
        self.max_power_w = info.max_power_w
        self.history = History()
        self._pool = WorkerPool(os.cpu_count() or 1, BUILD_TIMEOUT_S)
        self.builder = PooledBuilder(self._pool, self.history, build_simulated)
        self.runner = SimulatedRunner(self.gpu, self.history)

    def measure(
        self, artifacts: Sequence[Artifact], plan: MeasurementPlan
    ) -> list[EnergyMeasurement | str]:
        """See `TuningDevice.measure`; takes virtual time only."""
        loads = [self.gpu.load(read_work(artifact.path)) for artifact in artifacts]
        if len(loads) > 1:
            results = measure_interleaved(loads, self._nvml_meter, plan)
            return [r if isinstance(r, EnergyMeasurement) else str(r) for r in results]
        try:
            return [measure(loads[0], self._nvml_meter, plan)]
        except MeasurementError as exc:
            return [str(exc)]

    def close(self) -> None:
        """See `TuningDevice.close`."""
        self.builder.core.close()
        self._pool.close()
        self._nvml_meter.close()


def read_work(path: str) -> KernelWork:
    """The kernel description in an artifact."""
    return KernelWork.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


@derived_object
class SimulatedRunner(PyRunner):
    """Answers with simulated run times."""

    def __init__(self, gpu: SimulatedGpu, history: History) -> None:
        super().__init__()
        self.gpu = gpu
        self.history = history

    def run(self, runner_inputs: list[Any]) -> list[RunnerFuture]:
        """See ``PyRunner.run``."""
        futures = []
        for item in runner_inputs:
            path = str(item.artifact_path)
            recorded = self.history.recorded_latency_s(path)
            if recorded is not None:
                futures.append(finished([recorded], None))
            else:
                times = self.gpu.latency(read_work(path), _LATENCY_REPEATS)
                futures.append(finished([float(value) for value in times], None))
        return futures
