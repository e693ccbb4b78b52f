"""Virtual time, and the true power of a simulated device over it.

::

    power
      │      ┌──────┐      ┌──┐
      │      │ 180 W│      │  │ 250 W
      │──────┘      └──────┘  └───────  idle power in every gap and after the last segment
      └──────────────────────────────► virtual seconds

Energy between two moments is the difference of one cumulative sum, found by bisection, so that a
query costs the same after a second and after a day of virtual time.
"""

from __future__ import annotations

import math
from bisect import bisect_right


class VirtualClock:
    """A `tvm_energy.meters.base.TimeSource` whose time passes only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Let that much virtual time pass.

        Raises:
            ValueError: for a negative or non-finite time.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds must be finite and not negative, got {seconds}")
        self._now_s += seconds

    advance = sleep

    def advance_to(self, time_s: float) -> None:
        """Go to that moment, or stay where it has passed already."""
        self._now_s = max(self._now_s, time_s)


class PowerTimeline:
    """True power as a piecewise constant function of virtual time.

    Args:
        idle_power_w: power where no segment was appended.
        history_s: how far back queries must reach. Older segments are forgotten (their energy is
            not: cumulative sums are absolute).
    """

    def __init__(self, idle_power_w: float, *, history_s: float = 120.0) -> None:
        if not (math.isfinite(idle_power_w) and idle_power_w >= 0):
            raise ValueError(f"idle_power_w must be finite and not negative, got {idle_power_w} W")
        self.idle_power_w = idle_power_w
        self._history_s = history_s
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []
        self._powers_w: list[float] = []
        self._energies_j: list[float] = []  # since time 0, at the start of each segment
        self._forgotten_until_s = -math.inf
        self._prune_at = 4096

    @property
    def end_s(self) -> float:
        """End of the last segment; 0 where there is none."""
        return self._ends_s[-1] if self._ends_s else 0.0

    def append(self, start_s: float, duration_s: float, power_w: float) -> None:
        """Add a segment of constant power behind all earlier ones.

        Raises:
            ValueError: it overlaps the last segment, or a value is negative or not finite.
        """
        if not (math.isfinite(power_w) and power_w >= 0):
            raise ValueError(f"power_w must be finite and not negative, got {power_w}")
        if not (math.isfinite(duration_s) and duration_s >= 0):
            raise ValueError(f"duration_s must be finite and not negative, got {duration_s}")
        if self._ends_s and start_s < self._ends_s[-1]:
            raise ValueError(
                f"a segment from {start_s} s overlaps the last one, which ends at {self.end_s} s"
            )
        if self._ends_s and start_s == self._ends_s[-1] and power_w == self._powers_w[-1]:
            self._ends_s[-1] = start_s + duration_s
            return
        energy_j = self.cumulative_j(start_s)
        self._starts_s.append(start_s)
        self._ends_s.append(start_s + duration_s)
        self._powers_w.append(power_w)
        self._energies_j.append(energy_j)
        if len(self._starts_s) >= self._prune_at:
            self._forget()

    def energy_j(self, t0_s: float, t1_s: float) -> float:
        """Joules between two moments; idle power is included.

        Raises:
            ValueError: ``t1_s < t0_s``, or ``t0_s`` lies before the remembered history.
        """
        if t1_s < t0_s:
            raise ValueError(f"the interval from {t0_s} s to {t1_s} s runs backwards")
        return self.cumulative_j(t1_s) - self.cumulative_j(t0_s)

    def mean_power_w(self, t0_s: float, t1_s: float) -> float:
        """Mean power between two different moments."""
        if not t1_s > t0_s:
            raise ValueError(f"a mean needs an interval, got {t0_s} s to {t1_s} s")
        return self.energy_j(t0_s, t1_s) / (t1_s - t0_s)

    def cumulative_j(self, time_s: float) -> float:
        """Joules from time 0 to that moment (negative before time 0).

        Raises:
            ValueError: the moment lies before the remembered history.
        """
        if time_s < self._forgotten_until_s:
            raise ValueError(
                f"power at {time_s} s is forgotten; the history reaches back to "
                f"{self._forgotten_until_s} s (history_s={self._history_s})"
            )
        index = bisect_right(self._starts_s, time_s) - 1
        if index < 0:
            return self.idle_power_w * time_s
        busy_s = min(time_s, self._ends_s[index]) - self._starts_s[index]
        idle_s = max(0.0, time_s - self._ends_s[index])
        return self._energies_j[index] + self._powers_w[index] * busy_s + self.idle_power_w * idle_s

    def _forget(self) -> None:
        keep_from = bisect_right(self._ends_s, self.end_s - self._history_s)
        if keep_from > 0:
            self._forgotten_until_s = self._starts_s[keep_from]
            for values in (self._starts_s, self._ends_s, self._powers_w, self._energies_j):
                del values[:keep_from]
        # Doubling keeps the cost of pruning constant a segment, however dense the history is.
        self._prune_at = max(4096, 2 * len(self._starts_s))
