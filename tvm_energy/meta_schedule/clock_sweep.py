"""Kernels, or blocks of a network, in TVM's default schedule, measured at locked clocks on a real or simulated GPU.

A block is the sum of its kernels, each measured by itself and counted as often as the block calls it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tvm

from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sweep import ClockControl, Point
from tvm_energy.errors import MeasurementError, MeterUnavailable, TvmEnergyError
from tvm_energy.kernels.clock_control import open_clocks
from tvm_energy.kernels.devices import Artifact
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.blocks import blocks_of
from tvm_energy.meta_schedule.device import TuningDevice, open_device
from tvm_energy.meta_schedule.networks import Network
from tvm_energy.meta_schedule.workloads import Workload


class DeviceSweep:
    """A device whose clock can be locked, and the kernels or blocks to measure there; from `open_sweep`.

    Attributes:
        title: device and kernels in one line; says so when simulated.
        names: of what is measured.
        clock_mhz: clocks that can be locked, ascending.
        power_limit_w: of the device.
    """

    def __init__(
        self,
        device: TuningDevice,
        control: ClockControl,
        clocks: Array,
        artifacts: dict[str, Artifact],
        parts: dict[str, tuple[str, ...]],
    ) -> None:
        self.names = list(parts)
        self.clock_mhz = clocks
        self.power_limit_w = device.max_power_w
        # The name of a simulated device begins with the word.
        self.title = f"{device.identity['name']}, kernels in TVM's default schedule"
        self._device = device
        self._control = control
        self._artifacts = artifacts
        self._parts = parts

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """See `ClockControl`."""
        return self._control.locked(clock_mhz)

    def measure(self, clock_mhz: float) -> list[Point]:
        """Every kernel or block at the clock that is locked."""
        results: dict[str, EnergyMeasurement] = {}
        for name, artifact in self._artifacts.items():
            (result,) = self._device.measure([artifact], MeasurementPlan())
            if not isinstance(result, EnergyMeasurement):
                raise MeasurementError(f"measuring {name} at {clock_mhz:g} MHz failed: {result}")
            results[name] = result
        return [_sum([results[name] for name in parts]) for parts in self._parts.values()]


def _sum(parts: Sequence[EnergyMeasurement]) -> Point:
    """Kernels that run one after the other, as one."""
    latency_s = math.fsum(one.latency_s for one in parts)
    energy_j = math.fsum(one.energy_j for one in parts)
    return Point(
        latency_s=latency_s,
        power_w=energy_j / latency_s,
        effective_mhz=_mean_clock(parts),
        power_stderr=math.hypot(*(one.stderr_j for one in parts)) / energy_j,
    )


def _mean_clock(parts: Sequence[EnergyMeasurement]) -> float | None:
    """Mean over time; None where it cannot be read."""
    cycles = 0.0
    for one in parts:
        if one.clock_mhz is None:
            return None
        cycles += one.clock_mhz * one.latency_s
    return round(cycles / math.fsum(one.latency_s for one in parts), 3)


@contextlib.contextmanager
def open_sweep(
    spec: str, workloads: Sequence[Workload] = (), network: Network | None = None, blocks: int = 16
) -> Iterator[DeviceSweep]:
    """Open a device and build the kernels for it.

    Args:
        spec: as in ``--device``.
        workloads: what to measure; or
        network: whose blocks to measure, see `tvm_energy.meta_schedule.blocks`.
        blocks: into how many it is divided at most.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: its energy cannot be measured.
    """
    with contextlib.closing(open_device(spec)) as device:
        if device.meter is None:
            raise MeterUnavailable(f"no energy meter on {spec}: {device.no_meter_reason}")
        control, clocks = open_clocks(device)
        functions = {workload.spec: workload.primfunc() for workload in workloads}
        parts: dict[str, tuple[str, ...]] = {name: (name,) for name in functions}
        if network is not None:
            divided, module = blocks_of(network, device.target, blocks)
            parts = {block.name: block.kernels for block in divided}
            used = dict.fromkeys(name for block in divided for name in block.kernels)
            functions = {name: module[name] for name in used}
        artifacts = {
            name: _artifact(device, name, function) for name, function in functions.items()
        }
        yield DeviceSweep(device, control, clocks, artifacts, parts)


def _artifact(device: TuningDevice, name: str, function: Any) -> Artifact:
    """Build a PrimFunc in TVM's default schedule."""
    from tvm.s_tir import dlight
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    from tvm_energy.meta_schedule.runner import argument_infos

    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    rules = ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback")
    with device.target:
        scheduled = dlight.ApplyDefaultSchedule(*(getattr(dlight.gpu, rule)() for rule in rules))(
            module
        )
    path, error = device.builder.core.build_again(scheduled, device.target)
    if path is None:
        raise TvmEnergyError(f"{name} could not be built: {error}")
    return Artifact(path=path, arguments=argument_infos(ArgInfo.from_prim_func(function)))
