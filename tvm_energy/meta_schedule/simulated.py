"""A simulated GPU behind the same interfaces: TVM's real search space and code, a simulated device."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture

from tvm_energy.kernels.devices import SimulatedDevice, write_work
from tvm_energy.meta_schedule.builder import PooledBuilder
from tvm_energy.meta_schedule.runner import finished
from tvm_energy.simulation.devices import find_device


def build_simulated(mod: Any, target: Any, folder: str) -> str:
    """In a worker: describe what the scheduled kernel would do on a GPU, as a JSON file."""
    from tvm_energy.meta_schedule.kernel_description import describe_kernel

    work = describe_kernel(mod, target)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "kernel.json")
    write_work(work, path)
    return path


class SimulatedTuningDevice(SimulatedDevice):
    """``sim:a100`` and its kin; see `TuningDevice`."""

    def __init__(self, spec: str, target: Any = None, seed: int = 0) -> None:
        import tvm

        if target is None:
            target = find_device(spec.removeprefix("sim:")).target
        self.target = tvm.target.Target(target)
        super().__init__(spec, str(self.target), seed)
        self.builder = PooledBuilder(self.build_pool, self.history, build_simulated)
        self.runner = SimulatedRunner(self)

    def close(self) -> None:
        """See `TuningDevice.close`."""
        self.builder.core.close()
        super().close()


@derived_object
class SimulatedRunner(PyRunner):
    """Answers with simulated run times."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device = device

    def run(self, runner_inputs: list[Any]) -> list[RunnerFuture]:
        """See ``PyRunner.run``."""
        futures = []
        for item in runner_inputs:
            path = str(item.artifact_path)
            recorded = self.device.history.recorded_latency_s(path)
            if recorded is not None:
                futures.append(finished([recorded], None))
            else:
                futures.append(finished(self.device.latency_s(path), None))
        return futures
