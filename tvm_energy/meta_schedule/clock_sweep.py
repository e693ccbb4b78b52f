"""Kernels in TVM's default schedule, measured at locked clocks on a real or simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tvm

from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sweep import ClockControl, Point
from tvm_energy.errors import MeasurementError, MeterUnavailable, TvmEnergyError
from tvm_energy.kernels.clock_control import open_clocks
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
        MeterUnavailable: its energy cannot be measured.
    """
    with contextlib.closing(open_device(spec)) as device:
        if device.meter is None:
            raise MeterUnavailable(f"no energy meter on {spec}: {device.no_meter_reason}")
        control, clocks = open_clocks(device)
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
