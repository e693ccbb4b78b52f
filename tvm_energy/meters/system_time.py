"""Real time as a `tvm_energy.meters.base.TimeSource`."""

from __future__ import annotations

import time


class SystemTime:
    """Monotonic seconds of this machine."""

    def now(self) -> float:
        """Seconds since some fixed moment, with sub-microsecond resolution."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait; nothing happens for a time that is zero or negative."""
        if seconds > 0:
            time.sleep(seconds)
