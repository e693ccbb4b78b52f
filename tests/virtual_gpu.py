"""The smallest simulated card: kernels of given latency and power under a virtual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvm_energy.meters.base import DeviceState, MeterInfo, Reading
from tvm_energy.simulation.nvml import A100_SENSOR, SensorSpec, SimulatedNvml, SimulatedState
from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock

#: An A100's sensor without its gain error, so that truth and reading can be compared.
TRUE_SENSOR = dataclasses.replace(A100_SENSOR, gain=1.0)


class VirtualGpu:
    """Clock, power time line and NVML of one card."""

    def __init__(
        self, sensor: SensorSpec = TRUE_SENSOR, *, seed: int = 0, idle_power_w: float = 50.0
    ) -> None:
        self.clock = VirtualClock()
        self.timeline = PowerTimeline(idle_power_w)
        self.state = SimulatedState(clock_mhz=1410, temperature_c=51)
        self.nvml = SimulatedNvml(
            self.timeline,
            self.clock,
            sensor,
            name="test card",
            uuid="GPU-simulated",
            power_limit_w=400.0,
            state=lambda: self.state,
            seed=seed,
        )

    def load(self, latency_s: float, power_w: float) -> VirtualLoad:
        return VirtualLoad(self, latency_s, lambda _: power_w)


class VirtualLoad:
    """A kernel: seconds a launch, and watts as a function of time."""

    def __init__(
        self, gpu: VirtualGpu, latency_s: float, power_w: Callable[[float], float]
    ) -> None:
        self.gpu = gpu
        self.latency_s = latency_s
        self.power_w = power_w
        self.launches = 0

    def enqueue(self, launches: int) -> None:
        start_s = max(self.gpu.clock.now(), self.gpu.timeline.end_s)
        self.gpu.timeline.append(start_s, launches * self.latency_s, self.power_w(start_s))
        self.launches += launches

    def synchronize(self) -> None:
        self.gpu.clock.advance_to(self.gpu.timeline.end_s)


class BlockingLoad(VirtualLoad):
    """A kernel on a processor: `enqueue` returns when the launches are done."""

    def enqueue(self, launches: int) -> None:
        super().enqueue(launches)
        super().synchronize()


class ScriptedMeter:
    """A sensor whose value is a function of virtual time."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        energy_j: Callable[[float], float] | None = None,
        power_w: Callable[[float], float] | None = None,
        update_period_s: float = 0.1,
        max_power_w: float | None = 400.0,
    ) -> None:
        self.time = clock
        self.energy_j = energy_j
        self.power_w = power_w
        self.info = MeterInfo(
            meter="simulated",
            method="counter" if energy_j else "power_integral",
            scope="gpu",
            device_name="scripted card",
            device_uuid="GPU-scripted",
            update_period_s=update_period_s,
            resolution_j=1e-3 if energy_j else None,
            max_power_w=max_power_w,
            simulated=True,
        )

    def read(self) -> Reading:
        now_s = self.time.now()
        self.time.advance(20e-6)
        return Reading(
            time_s=now_s,
            energy_j=self.energy_j(now_s) if self.energy_j else None,
            power_w=self.power_w(now_s) if self.power_w else None,
        )

    def state(self) -> DeviceState:
        return DeviceState()

    def close(self) -> None:
        pass
