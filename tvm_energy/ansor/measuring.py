"""Our builder and runner in place of Ansor's local ones, for as long as a ``with`` block runs.

Ansor's C++ looks ``auto_scheduler.local_builder.build`` and ``auto_scheduler.local_runner.run`` up by
name for every batch. Stock, both start new processes for each batch, which import TVM again. Ours
keep their workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tvm_energy.ansor.compat import load_auto_scheduler

# isort: split
import tvm
from tvm.auto_scheduler.measure import BuildResult, MeasureErrorNo, MeasureResult

from tvm_energy.ansor.device import AnsorDevice
from tvm_energy.ansor.names import names_of

BUILD = "auto_scheduler.local_builder.build"
RUN = "auto_scheduler.local_runner.run"

#: What Ansor writes as the time of a program that has none.
FAILED_S = 1e10


@contextlib.contextmanager
def measuring_on(device: AnsorDevice) -> Iterator[AnsorDevice]:
    """Let Ansor's ``LocalBuilder`` and ``LocalRunner`` build for and run on a device.

    The settings of ``LocalRunner`` hold (``number``, ``repeat``, ``min_repeat_ms``, the cool-down, the
    cache flush); the time limits and the number of processes are those of our workers.

    Args:
        device: an open device; it stays open.
    """
    load_auto_scheduler()
    stock = {name: tvm.get_global_func(name) for name in (BUILD, RUN)}
    ours = {BUILD: _Builder(device), RUN: _Runner(device)}
    try:
        for name, function in ours.items():
            tvm.register_func(name, function, override=True)
        yield device
    finally:
        for name, function in stock.items():
            tvm.register_func(name, function, override=True)


class _Builder:
    def __init__(self, device: AnsorDevice) -> None:
        self._device = device

    def __call__(
        self,
        inputs: Sequence[Any],
        timeout: int,
        n_parallel: int,
        build_func: str = "default",
        verbose: int = 1,
    ) -> list[Any]:
        started = time.perf_counter()
        errors = self._device.build(inputs)
        seconds = (time.perf_counter() - started) / max(1, len(inputs))
        return [_build_result(error, seconds) for error in errors]


def _build_result(error: str | None, seconds: float) -> Any:
    if error is None:
        return BuildResult("", [], MeasureErrorNo.NO_ERROR, None, seconds)
    kind = MeasureErrorNo.COMPILE_HOST
    if error.startswith("timeout"):
        kind = MeasureErrorNo.BUILD_TIMEOUT
    return BuildResult("", [], kind, f"build: {error}", seconds)


class _Runner:
    def __init__(self, device: AnsorDevice) -> None:
        self._device = device

    def __call__(
        self,
        inputs: Sequence[Any],
        build_results: Sequence[Any],
        timeout: int,
        number: int,
        repeat: int,
        min_repeat_ms: int,
        cooldown_interval: float,
        enable_cpu_cache_flush: bool,
        verbose: int,
        device: int,
    ) -> list[Any]:
        results = []
        for item, build in zip(inputs, build_results, strict=True):
            started = time.perf_counter()
            if int(build.error_no):
                results.append(_failed(int(build.error_no), str(build.error_msg), 0.0))
                continue
            run_secs, error = self._device.time(
                self._device.artifacts[names_of(item)],
                number=number,
                repeat=repeat,
                min_repeat_ms=min_repeat_ms,
                flush=bool(enable_cpu_cache_flush),
            )
            if run_secs is None:
                seconds = time.perf_counter() - started
                results.append(_failed(_run_error(str(error)), f"run: {error}", seconds))
            else:
                time.sleep(float(cooldown_interval))
                seconds = time.perf_counter() - started
                results.append(MeasureResult(run_secs, 0, "", seconds, time.time()))
        return results


def _run_error(error: str) -> int:
    kind = MeasureErrorNo.RUNTIME_DEVICE
    return int(MeasureErrorNo.RUN_TIMEOUT if error.startswith("timeout") else kind)


def _failed(kind: int, message: str, seconds: float) -> Any:
    return MeasureResult([FAILED_S], kind, message, seconds, time.time())
