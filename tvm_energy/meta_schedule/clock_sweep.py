"""Kernels in TVM's default schedule, measured at locked clocks on a real or simulated GPU."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import tvm

from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sweep import ClockControl, Point
from tvm_energy.errors import ConfigurationError, MeasurementError, MeterUnavailable, TvmEnergyError
from tvm_energy.kernels.devices import Artifact
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.device import TuningDevice, open_device
from tvm_energy.meta_schedule.workloads import Workload


class DeviceSweep:
    """A device whose clock can be locked, and the kernels to measure there; from `open_sweep`.

    Attributes:
        title: device and kernels in one line; says so when simulated.
        clock_mhz: clocks that can be locked, ascending.
        power_limit_w: of the device.
    """

    def __init__(
        self, device: TuningDevice, control: ClockControl, clocks: Array, artifacts: list[Artifact]
    ) -> None:
        self.clock_mhz = clocks
        self.power_limit_w = device.max_power_w
        # The name of a simulated device begins with the word.
        self.title = f"{device.identity['name']}, kernels in TVM's default schedule"
        self._device = device
        self._control = control
        self._artifacts = artifacts

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """See `ClockControl`."""
        return self._control.locked(clock_mhz)

    def measure(self, clock_mhz: float) -> list[Point]:
        """Every kernel at the clock that is locked."""
        points = []
        for artifact in self._artifacts:
            (result,) = self._device.measure([artifact], MeasurementPlan())
            if not isinstance(result, EnergyMeasurement):
                raise MeasurementError(f"measuring at {clock_mhz:g} MHz failed: {result}")
            points.append(
                Point(
                    latency_s=result.latency_s,
                    power_w=result.power_w,
                    effective_mhz=result.clock_mhz,
                    power_stderr=result.stderr_j / result.energy_j,
                )
            )
        return points


@contextlib.contextmanager
def open_sweep(spec: str, workloads: Sequence[Workload]) -> Iterator[DeviceSweep]:
    """Open a device and build the kernels for it.

    Args:
        spec: as in ``--device``.
        workloads: what to measure.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: its energy cannot be measured, or its clock not be locked.
    """
    with contextlib.closing(open_device(spec)) as device:
        if device.meter is None:
            raise MeterUnavailable(f"no energy meter on {spec}: {device.no_meter_reason}")
        control, clocks = _clocks(device)
        artifacts = [_artifact(device, workload) for workload in workloads]
        yield DeviceSweep(device, control, clocks, artifacts)


def _artifact(device: TuningDevice, workload: Workload) -> Artifact:
    """Build a workload in TVM's default schedule."""
    from tvm.s_tir import dlight
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    from tvm_energy.meta_schedule.runner import argument_infos

    function = workload.primfunc()
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    rules = ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback")
    with device.target:
        scheduled = dlight.ApplyDefaultSchedule(*(getattr(dlight.gpu, rule)() for rule in rules))(
            module
        )
    path, error = device.builder.core.build_again(scheduled, device.target)
    if path is None:
        raise TvmEnergyError(f"{workload.spec} could not be built: {error}")
    return Artifact(path=path, arguments=argument_infos(ArgInfo.from_prim_func(function)))


def _clocks(device: TuningDevice) -> tuple[ClockControl, Array]:
    """Who locks the clock of a device, and which clocks it has."""
    import numpy as np

    if device.spec.startswith("sim:"):
        gpu: Any = getattr(device, "gpu")  # noqa: B009  (only simulated devices have one)
        return gpu, np.array(gpu.spec.clocks_mhz)
    control = _NvmlClocks(device.spec.removeprefix("cuda:"))
    return control, control.supported()


class _NvmlClocks:
    """`ClockControl` through ``tvm_energy.clocks``."""

    def __init__(self, uuid: str) -> None:
        try:
            self._clocks = importlib.import_module("tvm_energy.clocks")
            self._nvml_clocks = importlib.import_module("tvm_energy.meters.nvml_clocks")
        except ImportError as exc:
            raise ConfigurationError(
                "this version cannot lock the clock of a real GPU; use sim:a100, or --from TABLE with "
                "measurements at locked clocks"
            ) from exc
        self._uuid = uuid

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """See `ClockControl`; raises where there is no permission."""
        lock: contextlib.AbstractContextManager[object] = self._clocks.locked_clocks(
            round(clock_mhz), device=self._uuid, required=True
        )
        return lock

    def supported(self) -> Array:
        """Core clocks at the highest memory clock, ascending."""
        import numpy as np

        with contextlib.closing(self._nvml_clocks.open_clock_control(self._uuid)) as control:
            table: dict[int, list[int]] = control.supported_mhz()
        return np.array(sorted(table[max(table)]), dtype=float)
