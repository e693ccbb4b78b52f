"""Timing kernels, with time spent where it can matter.

Kernels that a short run shows to be slower than the best known get no long timing. That, and
loading a library that the builder already linked, is the difference to the stock local runners; the
latency of every kernel that could win is measured the same way.
"""

from __future__ import annotations

from typing import Any

from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.kernels.workers import ArgumentInfo, run_library


class KernelTimer:
    """Times kernels in a worker process.

    Args:
        pool: one worker process, so that kernels do not disturb each other.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        # Arguments stand for the task here: kernels of one task have the same ones.
        self._best_s: dict[tuple[ArgumentInfo, ...], float] = {}

    def time(
        self,
        path: str,
        device_type: str,
        arguments: list[ArgumentInfo],
        *,
        number: int,
        repeat: int,
        min_repeat_ms: int,
        preprocess: str = "",
    ) -> tuple[list[float] | None, str | None]:
        """Seconds a launch, one number for each repeat, or the reason why there are none.

        Args:
            path: of the shared library.
            device_type: ``cpu`` or ``cuda``.
            arguments: shapes and dtypes of the kernel's arguments.
            number, repeat, min_repeat_ms: as in TVM's time evaluator.
            preprocess: name of the TVM function that is called before each repeat, or nothing.
        """
        task = tuple(arguments)
        best_s = self._best_s.get(task, float("inf"))
        options = {
            "number": number,
            "repeat": repeat,
            "min_repeat_ms": min_repeat_ms,
            "preprocess": preprocess,
            "best_s": best_s,
            "seed": 0,
        }
        ((run_secs, error),) = self._pool.map(_run, [(path, device_type, arguments, options)])
        if run_secs is None:
            return None, error
        self._best_s[task] = min(best_s, sum(run_secs) / len(run_secs))
        return run_secs, None


def _run(path: str, device_type: str, arguments: Any, options: dict[str, Any]) -> list[float]:
    return run_library(path, device_type, arguments, **options)
