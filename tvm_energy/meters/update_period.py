"""How often a sensor updates: measured, because published periods differ from card to card.

Counters of 10, 20 and 100 ms were all reported for NVIDIA GPUs (gpuopenanalytics/pynvml#18;
arXiv:2312.02741, Overall_Results.xlsx), and drivers change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tvm_energy.meters.base import TimeSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes of a sensor seen while polling it.

    Attributes:
        times_s: when each change was seen.
        values: the value after each change.
    """

    times_s: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def update_period_s(self) -> float | None:
        """Median gap between changes; None where fewer than three changes were seen."""
        if len(self.times_s) < 3:
            return None
        gaps = [later - earlier for earlier, later in pairwise(self.times_s)]
        return median(gaps)


def watch_changes(
    read: Callable[[], float],
    time: TimeSource,
    *,
    poll_s: float,
    limit_s: float,
    wanted: int = 7,
    on_change: Callable[[], None] | None = None,
) -> Changes:
    """Poll a sensor until it has changed often enough.

    Args:
        read: returns the present value.
        time: passes the time between polls.
        poll_s: time between polls; the period is known to about this.
        limit_s: give up after this time.
        wanted: number of changes to wait for.
        on_change: called after each change (to read another sensor at the same moment).
    """
    started_s = time.now()
    last = read()
    times_s: list[float] = []
    values: list[float] = []
    while len(times_s) < wanted and time.now() - started_s < limit_s:
        time.sleep(poll_s)
        value = read()
        if value == last:
            continue
        last = value
        times_s.append(time.now())
        values.append(value)
        if on_change is not None:
            on_change()
    return Changes(times_s=tuple(times_s), values=tuple(values))
