"""Kernels without tuning: TVM's own default schedules, and compiled libraries.

The default schedule of a GPU kernel is that of DLight, TVM's package of schedule rules; DLight's rule for
everything is the last resort. On a processor DLight has few rules, and what none of them knows runs as its loops are
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_energy.errors import ConfigurationError, MeasurementError
from tvm_energy.kernels.devices import Artifact
from tvm_energy.kernels.workers import ArgumentInfo, plain_reason
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.device import TuningDevice
from tvm_energy.meta_schedule.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultKernel:
    """A built kernel, and the name of the schedule it has."""

    artifact: Artifact
    schedule: str


def build_default(workload: Workload, device: TuningDevice) -> DefaultKernel:
    """Build a workload with its default schedule.

    Raises:
        MeasurementError: no default schedule of it can be built for this device.
    """
    reasons = []
    for name, schedule in _schedules(device.target.kind.name):
        try:
            mod = schedule(workload.primfunc(), device.target)
        except Exception as exc:  # DLight raises many kinds where a rule does not fit after all
            reasons.append(f"{name}: {plain_reason(str(exc))}")
            continue
        path, error = device.builder.core.build_again(mod, device.target)
        if path is not None:
            arguments: list[ArgumentInfo] = [
                (item.shape, item.dtype) for item in workload.arguments
            ]
            return DefaultKernel(artifact=Artifact(path=path, arguments=arguments), schedule=name)
        reasons.append(f"{name}: {plain_reason(error)}")
    raise MeasurementError(
        f"no default schedule of {workload.spec} can be built for {device.spec} "
        f"({'; '.join(reasons)}); tune it instead: tvm-energy tune --workload {workload.spec}"
    )


def measure_artifact(
    artifact: Artifact, device: TuningDevice, plan: MeasurementPlan
) -> EnergyMeasurement:
    """Measure one built kernel.

    Raises:
        MeasurementError: with the reason.
        MeterUnavailable: the device has no energy meter.
    """
    (result,) = device.measure([artifact], plan)
    if isinstance(result, str):
        raise MeasurementError(plain_reason(result))
    return result


def parse_argument(text: str) -> ArgumentInfo:
    """``"1,3,224,224:float32"`` -> ``((1, 3, 224, 224), "float32")``; float32 where no type is given.

    Raises:
        ConfigurationError: naming the text that is not of this form.
    """
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or not _is_dtype(dtype or "float32"):
        raise ConfigurationError(
            f"--arg {text!r} is not of the form 1,3,224,224:float32 with positive sizes and a numpy "
            "type"
        )
    return shape, dtype or "float32"


def check_library(path: Path) -> None:
    """Find what is wrong with the name of a library before anything loads it.

    Raises:
        ConfigurationError: no such file, or no shared library.
    """
    if not path.is_file():
        raise ConfigurationError(f"--library {path} does not exist; give the path of a .so file")
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise ConfigurationError(
                f"--library {path} is not a shared library; make one with export_library('name.so')"
            )


def _schedules(kind: str) -> Sequence[tuple[str, Callable[[Any, Any], Any]]]:
    if kind == "llvm":
        return (("dlight", _cpu_rules), ("as written", _as_written))
    return (("dlight", _gpu_rules), ("dlight fallback", _gpu_fallback))


def _cpu_rules(function: Any, target: Any) -> Any:
    from tvm.s_tir import dlight

    return _apply(function, target, dlight.cpu.GEMV(), dlight.cpu.Reduction())


def _as_written(function: Any, target: Any) -> Any:
    import tvm

    del target
    return tvm.IRModule({"main": function})


def _gpu_rules(function: Any, target: Any) -> Any:
    from tvm.s_tir import dlight

    gpu = dlight.gpu
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    return _apply(function, target, *rules)


def _gpu_fallback(function: Any, target: Any) -> Any:
    from tvm.s_tir import dlight

    return _apply(function, target, dlight.gpu.Fallback())


def _apply(function: Any, target: Any, *rules: Any) -> Any:
    import tvm
    from tvm.s_tir import dlight

    with target:
        return dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({"main": function}))


def _is_dtype(name: str) -> bool:
    import ml_dtypes  # noqa: F401  (gives numpy bfloat16 and float8)
    import numpy as np

    try:
        return np.dtype(name).kind in "biufV"
    except TypeError:
        return False
