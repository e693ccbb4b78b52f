"""A meter of somebody's own, as ``meter=`` takes it: a counter on the wall socket of the machine."""

from __future__ import annotations

from collections.abc import Callable

from tvm_energy.meters.base import DeviceState, MeterInfo, Reading, TimeSource
from tvm_energy.meters.system_time import SystemTime

#: What the counter sees of every watt of the card.
FACTOR = 2.0
#: What the machine draws beside the card.
BASE_W = 100.0


class WallMeter:
    """Counts joules in steps, each update; by default those of a machine that always draws 100 W."""

    def __init__(
        self,
        card_j: Callable[[float], float] = lambda now_s: 0.0,
        time: TimeSource | None = None,
        *,
        simulated: bool = False,
    ) -> None:
        self._card_j = card_j
        self.time = time or SystemTime()
        self.info = MeterInfo(
            meter="wall",
            method="counter",
            scope="machine",
            device_name="rack 7",
            device_uuid="wall:rack7",
            update_period_s=0.02,
            resolution_j=1e-3,
            simulated=simulated,
        )

    def read(self) -> Reading:
        """See `PowerMeter.read`."""
        now_s = self.time.now()
        self.time.sleep(20e-6)
        updated_s = now_s // self.info.update_period_s * self.info.update_period_s
        energy_j = BASE_W * updated_s + FACTOR * self._card_j(updated_s)
        return Reading(time_s=now_s, energy_j=round(energy_j, 3))

    def state(self) -> DeviceState:
        """See `PowerMeter.state`."""
        return DeviceState()

    def close(self) -> None:
        """See `PowerMeter.close`."""
