"""The functions of ``zeus.device`` (Zeus 0.16) over the true power of a virtual card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from virtual_gpu import VirtualGpu


class ZeusGPUNotSupportedError(Exception):
    pass


class ZeusGPULostError(Exception):
    pass


class ZeusGPUInitError(Exception):
    pass


class ZeusSoCInitError(Exception):
    pass


class FakeGpus:
    """Like ``AMDGPUs``: a counter in whole mJ that moves every `period_s`, and power."""

    def __init__(
        self, card: VirtualGpu, *, count: int = 1, counter: bool = True, instant: bool = True
    ) -> None:
        self.card = card
        self.count = count
        self.counter = counter
        self.instant = instant
        self.lost = False
        self.period_s = 0.02

    def __len__(self) -> int:
        return self.count

    def _now(self) -> float:
        if self.lost:
            raise ZeusGPULostError("GPU is lost")
        self.card.clock.advance(100e-6)
        return self.card.clock.now() // self.period_s * self.period_s

    def get_name(self, index: int) -> str:
        return f"AMD Instinct {index}"

    def supports_get_total_energy_consumption(self, index: int) -> bool:
        return self.counter

    def get_total_energy_consumption(self, index: int) -> int:
        if not self.counter:
            raise ZeusGPUNotSupportedError("Total energy consumption is not supported")
        return int(1e6 + self.card.timeline.cumulative_j(self._now()) * 1e3)

    def get_instant_power_usage(self, index: int) -> int:
        if not self.instant:
            raise ZeusGPUNotSupportedError("Instant power usage is not supported")
        return self.get_average_power_usage(index)

    def get_average_power_usage(self, index: int) -> int:
        at_s = self._now()
        noise_mw = hash(round(at_s / self.period_s)) * 7919 % 401 - 200
        return round(self.card.timeline.mean_power_w(at_s - self.period_s, at_s) * 1e3) + noise_mw

    def get_power_management_limit(self, index: int) -> int:
        return 300_000

    def get_gpu_temperature(self, index: int) -> int:
        return 48


@dataclass
class JetsonMeasurement:
    cpu_energy_mj: float | None
    gpu_energy_mj: float | None
    total_energy_mj: float | None


class Jetson:
    """Like Zeus' class of this name: three rails, updated ten times a second."""

    def __init__(self, card: VirtualGpu, *, total: bool = True) -> None:
        self.card = card
        self.total = total

    def get_available_metrics(self) -> set[str]:
        return {"cpu_energy_mj", "gpu_energy_mj"} | ({"total_energy_mj"} if self.total else set())

    def get_total_energy_consumption(self) -> JetsonMeasurement:
        self.card.clock.advance(100e-6)
        at_s = self.card.clock.now() // 0.1 * 0.1
        total_mj = self.card.timeline.cumulative_j(at_s) * 1e3
        return JetsonMeasurement(0.2 * total_mj, 0.6 * total_mj, total_mj if self.total else None)


class FakeDevices:
    """Stands for the module ``zeus.device``."""

    def __init__(self, gpus: FakeGpus | None = None, soc: Any = None) -> None:
        self.gpus = gpus
        self.soc = soc

    def get_gpus(self) -> FakeGpus:
        if self.gpus is None:
            raise ZeusGPUInitError("NVML and AMDSMI unavailable.")
        return self.gpus

    def get_soc(self) -> Any:
        if self.soc is None:
            raise ZeusSoCInitError("No observable SoC was found on the current machine.")
        return self.soc
