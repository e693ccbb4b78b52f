"""A load in real time that costs no processor time: the 'device' is busy because we say so."""

from __future__ import annotations

import time


class SleepLoad:
    """Asynchronous like a GPU: launches queue up, `synchronize` sleeps until they are done."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self._busy_until_s = 0.0

    def enqueue(self, launches: int) -> None:
        start_s = max(time.perf_counter(), self._busy_until_s)
        self._busy_until_s = start_s + launches * self.latency_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._busy_until_s - time.perf_counter()))
