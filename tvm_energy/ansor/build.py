"""Building one candidate of Ansor, in a worker process."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tvm_energy.kernels.workers import LINK_OPTIONS, ArgumentInfo


def build_library(serialized: Any, folder: str) -> tuple[str, list[ArgumentInfo]]:
    """Compile a program into a shared library.

    Stock Ansor exports an archive that the (single) runner links; linking here instead happens in
    parallel.

    Args:
        serialized: ``MeasureInput.serialize()``.
        folder: where the library goes.

    Returns:
        Path of the library; shapes and dtypes of the kernel's arguments.
    """
    from tvm.driver import build_module

    schedule, tensors, target = _schedule(serialized)
    library = build_module.build(schedule, tensors, target=target)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "kernel.so")
    library.export_library(path, options=LINK_OPTIONS)
    return path, _infos(tensors)


def build_simulated(serialized: Any, folder: str) -> tuple[str, list[ArgumentInfo]]:
    """Describe what a program would do on a GPU, as a JSON file; see `build_library`."""
    from tvm_energy.ansor.kernel_description import describe_kernel
    from tvm_energy.kernels.devices import write_work

    schedule, tensors, target = _schedule(serialized)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "kernel.json")
    write_work(describe_kernel(schedule, tensors, target), path)
    return path, _infos(tensors)


def _schedule(serialized: Any) -> tuple[Any, Any, Any]:
    """The program's schedule, its arguments, and its target with host."""
    from tvm.auto_scheduler.measure import MeasureInput
    from tvm.target import Target

    program = MeasureInput.deserialize(serialized)
    task = program.task
    target, _ = Target.canon_target_and_host(task.target, task.target_host)
    schedule, tensors = task.compute_dag.apply_steps_from_state(
        program.state, layout_rewrite=task.layout_rewrite_option
    )
    return schedule, tensors, target


def _infos(tensors: Any) -> list[ArgumentInfo]:
    return [
        (tuple(int(extent) for extent in tensor.shape), str(tensor.dtype)) for tensor in tensors
    ]
