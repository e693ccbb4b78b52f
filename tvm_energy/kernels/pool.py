"""A pool of worker processes that are kept from batch to batch.

Stock MetaSchedule starts new build workers for every batch, each of which imports TVM and its tensor
intrinsics again; most of the time of a stock CPU tuning run goes there. Here workers live on, and
are replaced after `USES_PER_WORKER` jobs, since builds leak memory (apache/tvm issue 11074).
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from tvm_energy.kernels.workers import prepare_worker

USES_PER_WORKER = 500


class WorkerPool:
    """Runs functions in other processes.

    Args:
        workers: number of processes.
        timeout_s: a job that takes longer is killed with its process.
        environment: environment variables set in the workers before TVM is loaded.
    """

    def __init__(
        self, workers: int, timeout_s: float, environment: dict[str, str] | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self._pool: Any = _popen_pool().PopenPoolExecutor(
            max_workers=workers,
            timeout=timeout_s,
            initializer=prepare_worker,
            initargs=(environment or {},),
            maximum_process_uses=USES_PER_WORKER,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def map(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
    ) -> list[tuple[Any, str | None]]:
        """Run ``function(*job)`` for each job; (value, None) or (None, reason) in the order of jobs."""
        outcomes: list[tuple[Any, str | None]] = []
        kinds = _popen_pool().StatusKind
        for job, result in zip(
            jobs, self._pool.map_with_error_catching(_Spread(function), jobs), strict=True
        ):
            del job
            if result.status == kinds.COMPLETE:
                outcomes.append((result.value, None))
            elif result.status == kinds.TIMEOUT:
                outcomes.append((None, f"timeout: killed after {self.timeout_s:g} s"))
            elif isinstance(result.value, ChildProcessError):
                outcomes.append((None, "crash: the worker process died"))
            else:
                outcomes.append((None, _reason(result.value)))
        return outcomes

    def close(self) -> None:
        """End all workers."""
        pool, self._pool = self._pool, None
        # TVM up to 0.19 has no `shutdown`; there a pool ends its workers when it is let go.
        if hasattr(pool, "shutdown"):
            pool.shutdown(wait=True)


def _popen_pool() -> Any:
    """TVM's module of process pools, which moved after TVM 0.19."""
    try:
        from tvm.support import popen_pool
    except ImportError:
        from tvm.contrib import popen_pool
    return popen_pool


class _Spread:
    """``f(*args)`` as ``f(args)``; a class, so that it can be pickled by reference."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, job: tuple[Any, ...]) -> Any:
        return self.function(*job)


def _reason(exc: BaseException) -> str:
    """The last line of the worker's traceback first, then the whole of it."""
    text = str(exc).strip()
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return f"{last.strip() or type(exc).__name__}\n{text}"
