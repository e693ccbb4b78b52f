"""A simulated card: virtual time, temperature, and kernels as loads that the measuring code can run.

Launches are queued as on a real GPU: `SimulatedLoad.enqueue` returns at once, the work lies ahead on the
power time line, and `synchronize` lets virtual time pass until it is done. Under load the die warms
up with a first-order time constant and leakage follows, so back-to-back measurements drift as they
do on real cards.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tvm_energy.simulation.devices import DeviceSpec
from tvm_energy.simulation.gpu import NOMINAL_TEMPERATURE_C, KernelTruth, simulate
from tvm_energy.simulation.kernel import KernelWork
from tvm_energy.simulation.nvml import (
    A100_SENSOR,
    ADA_SENSOR,
    HOPPER_SENSOR,
    SensorSpec,
    SimulatedNvml,
    SimulatedState,
)
from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock

#: Relative standard deviation of one simulated run time (launch jitter, clock dither), and of the mean
#: of a whole queue of launches.
RUN_TIME_NOISE = 0.01
QUEUE_TIME_NOISE = 0.001

#: Kernel truths are worked out for temperatures rounded to this step.
_TEMPERATURE_STEP_C = 1.0

#: How the power sensor of each card behaves; another card has the default one.
_SENSORS = {"a100": A100_SENSOR, "rtx4090": ADA_SENSOR, "h200": HOPPER_SENSOR}

# Bits of nvmlDeviceGetCurrentClocksEventReasons.
_GPU_IDLE = 0x1
_SW_POWER_CAP = 0x4

#: One queue is laid down in pieces no longer than this, so that temperature follows.
_SEGMENT_S = 1.0


class SimulatedGpu:
    """One simulated card.

    Args:
        spec: what kind of card.
        clock: virtual time, shared with the meter.
        seed: which card of its kind, and its noise.
        clock_mhz: locked core clock; None runs at the highest that the power limit allows.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        *,
        clock: VirtualClock | None = None,
        seed: int = 0,
        clock_mhz: float | None = None,
    ) -> None:
        self.spec = spec
        self.clock = VirtualClock() if clock is None else clock
        self.seed = seed
        self.clock_mhz = clock_mhz
        self.timeline = PowerTimeline(spec.idle_power_w)
        self._rng = np.random.default_rng([seed, 0x51D])
        self._thermal = _Thermal(spec, self.clock.now())
        self._truths: dict[tuple[str, float, float | None], KernelTruth] = {}
        self._running: KernelTruth | None = None
        self._busy_until_s = self.clock.now()

    @contextlib.contextmanager
    def locked(self, clock_mhz: float) -> Iterator[float]:
        """Lock the core clock inside the block, at the nearest supported one, which it yields."""
        before = self.clock_mhz
        self.clock_mhz = self.spec.nearest_clock_mhz(clock_mhz)
        try:
            yield self.clock_mhz
        finally:
            self.clock_mhz = before

    def truth(self, work: KernelWork, *, clock_mhz: float | None = None) -> KernelTruth:
        """What the kernel costs, free of noise, at the nominal temperature.

        Args:
            work: the kernel.
            clock_mhz: core clock; None is the clock of this card.
        """
        return self._at(work, NOMINAL_TEMPERATURE_C, clock_mhz)

    def latency(self, work: KernelWork, repeats: int) -> list[float]:
        """Run times in seconds as a time evaluator would give them: noisy, one for each repeat."""
        true_s = self.truth(work).latency_s
        return [true_s * self._noise(RUN_TIME_NOISE) for _ in range(repeats)]

    def load(self, work: KernelWork) -> SimulatedLoad:
        """The kernel, ready to be launched on this card."""
        return SimulatedLoad(self, work)

    def nvml(self) -> SimulatedNvml:
        """This card's sensor, with the functions of the module ``pynvml``."""
        return SimulatedNvml(
            self.timeline,
            self.clock,
            _SENSORS.get(self.spec.name, SensorSpec()),
            name=self.spec.full_name,
            uuid=f"GPU-simulated-{self.spec.name}-{self.seed}",
            power_limit_w=self.spec.power_limit_w,
            state=self.state,
            lock_clock=self._lock_clock,
            clocks_mhz=[round(clock) for clock in reversed(self.spec.clocks_mhz)],
            seed=self.seed,
        )

    def state(self) -> SimulatedState:
        """Clock, temperature and limits at this moment."""
        truth = self.running()
        if truth is None:
            return SimulatedState(
                clock_mhz=self.spec.min_clock_mhz,
                temperature_c=self.temperature_c(),
                throttle_bits=_GPU_IDLE,
            )
        return SimulatedState(
            clock_mhz=truth.clock_mhz,
            temperature_c=self.temperature_c(),
            throttle_bits=_SW_POWER_CAP if truth.throttled else 0,
        )

    def _lock_clock(self, clock_mhz: float | None) -> None:
        self.clock_mhz = clock_mhz

    def temperature_c(self) -> float:
        """Die temperature now."""
        return self._thermal.at(min(self.clock.now(), self._busy_until_s), self.clock.now())

    def running(self) -> KernelTruth | None:
        """What runs at this moment; None when the card is idle."""
        return self._running if self.clock.now() < self._busy_until_s else None

    def enqueue(self, work: KernelWork, launches: int) -> None:
        """Queue launches behind everything queued before; virtual time does not pass.

        Raises:
            ValueError: a negative number of launches.
        """
        if launches < 0:
            raise ValueError(f"launches must not be negative, got {launches}")
        left = float(launches)
        while left > 0:
            start_s = max(self.clock.now(), self._busy_until_s)
            temperature_c = self._thermal.at(self._busy_until_s, start_s)
            truth = self._at(work, temperature_c, None)
            now = min(left, max(1.0, _SEGMENT_S / truth.latency_s))
            duration_s = now * truth.latency_s * self._noise(QUEUE_TIME_NOISE)
            self.timeline.append(start_s, duration_s, truth.power_w)
            self._busy_until_s = start_s + duration_s
            self._thermal.load(start_s, duration_s, truth.power_w)
            self._running = truth
            left -= now

    def synchronize(self) -> None:
        """Let virtual time pass until the queue is empty."""
        self.clock.advance_to(self._busy_until_s)

    def _at(self, work: KernelWork, temperature_c: float, clock_mhz: float | None) -> KernelTruth:
        rounded = round(temperature_c / _TEMPERATURE_STEP_C) * _TEMPERATURE_STEP_C
        clock = self.clock_mhz if clock_mhz is None else clock_mhz
        key = (work.digest, rounded, clock)
        if key not in self._truths:
            if len(self._truths) > 4096:
                self._truths.clear()
            self._truths[key] = simulate(
                self.spec, work, clock_mhz=clock, temperature_c=rounded, seed=self.seed
            )
        return self._truths[key]

    def _noise(self, deviation: float) -> float:
        return math.exp(deviation * float(np.clip(self._rng.standard_normal(), -4, 4)))


@dataclass
class SimulatedLoad:
    """One kernel on a simulated card (see `tvm_energy.meters.base.Load`)."""

    gpu: SimulatedGpu
    work: KernelWork

    def enqueue(self, launches: int) -> None:
        """See `Load.enqueue`: returns at once."""
        self.gpu.enqueue(self.work, launches)

    def synchronize(self) -> None:
        """See `Load.synchronize`: virtual time passes."""
        self.gpu.synchronize()


@dataclass
class _Thermal:
    """dT/dt = (ambient + R P - T) / tau, solved exactly for constant power."""

    spec: DeviceSpec
    time_s: float
    celsius: float = field(init=False)

    def __post_init__(self) -> None:
        self.celsius = self._steady(self.spec.idle_power_w)

    def _steady(self, power_w: float) -> float:
        return self.spec.ambient_c + self.spec.thermal_resistance_c_per_w * power_w

    def _after(self, seconds: float, power_w: float) -> float:
        steady = self._steady(power_w)
        decay = math.exp(-seconds / self.spec.thermal_time_constant_s)
        return steady + (self.celsius - steady) * decay

    def at(self, idle_from_s: float, time_s: float) -> float:
        """Temperature at a moment, the card being idle since ``idle_from_s``."""
        return self._after(max(0.0, time_s - idle_from_s), self.spec.idle_power_w)

    def load(self, start_s: float, duration_s: float, power_w: float) -> None:
        """Advance through an idle time up to ``start_s`` and a load behind it."""
        self.celsius = self._after(max(0.0, start_s - self.time_s), self.spec.idle_power_w)
        self.celsius = self._after(duration_s, power_w)
        self.time_s = start_s + duration_s
