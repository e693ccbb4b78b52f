"""A pool of worker processes that are kept from batch to batch.

Stock MetaSchedule starts new build workers for every batch, each of which imports TVM and its tensor
intrinsics again; most of the time of a stock CPU tuning run goes there. Here workers live on, and
are replaced after `USES_PER_WORKER` jobs, since builds leak memory (apache/tvm issue 11074).

The processes are TVM's ``PopenWorker``. Its ``PopenPoolExecutor`` is not used: it leaves the time
limit to the worker, so that one which hangs while it starts, or holds the interpreter's lock,
stops the tuner for ever; and it ends its workers when it is garbage collected, which can happen in
a thread that holds a lock the ending needs.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import psutil

from tvm_energy.kernels.workers import prepare_worker

USES_PER_WORKER = 500

#: A worker that has not answered this long after its job's own time limit is killed. A new worker
#: imports TVM in this time, which takes half a minute on a machine that is very busy.
GRACE_S = 120.0


class WorkerPool:
    """Runs functions in other processes.

    Args:
        workers: number of processes.
        timeout_s: a job that takes longer is ended with its process.
        environment: environment variables set in the workers before TVM is loaded.
        grace_s: a worker that says nothing this long after ``timeout_s`` is killed from outside.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        environment: dict[str, str] | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self.timeout_s = timeout_s
        self.deadline_s = timeout_s + grace_s
        self._workers = [
            _popen_pool().PopenWorker(
                prepare_worker,
                (environment or {},),
                maximum_uses=USES_PER_WORKER,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(workers)
        ]
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tvm_energy_pool")
        self._pending: set[Future[Any]] = set()

    def start(self) -> None:
        """Let the workers start now, in the background, so that the first jobs find them ready."""
        for _ in self._workers:
            self._submit(_nothing, ())

    def map(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
    ) -> list[tuple[Any, str | None]]:
        """Run ``function(*job)`` for each job; (value, None) or (None, reason) in the order of jobs."""
        futures = [self._submit(function, job) for job in jobs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all workers and what they are doing; jobs that did not start are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        running = set(self._pending)
        while running:
            for worker in self._workers:
                _kill(worker)
            _, running = wait(running, timeout=0.1)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()

    def _submit(self, function: Callable[..., Any], job: tuple[Any, ...]) -> Future[Any]:
        future = self._threads.submit(self._run, function, job)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _run(self, function: Callable[..., Any], job: tuple[Any, ...]) -> tuple[Any, str | None]:
        worker = self._idle.get()
        try:
            with _killed_after(self.deadline_s, worker):
                worker.send(function, job, timeout=self.timeout_s)
                return worker.recv(), None
        except TimeoutError:
            return None, f"timeout: killed after {self.timeout_s:g} s"
        except ChildProcessError:
            return None, "crash: the worker process died"
        except _Unresponsive:
            return None, f"timeout: the worker did not answer for {self.deadline_s:g} s"
        except Exception as exc:
            if not worker.is_alive():  # it died while it answered
                worker.kill()
            return None, _reason(exc)
        finally:
            self._idle.put(worker)


class _Unresponsive(Exception):
    """The worker was killed from outside."""


@contextlib.contextmanager
def _killed_after(seconds: float, worker: Any) -> Iterator[None]:
    """Kill the worker's process when the block takes longer, which also ends the block."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill(worker)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except ChildProcessError:
        if expired.is_set():
            raise _Unresponsive from None
        raise
    finally:
        timer.cancel()


def _kill(worker: Any) -> None:
    """Kill a worker's process and its children, if there is one.

    ``PopenWorker.kill`` also closes the pipes, for which it would wait as long as a thread reads
    from them; that thread sees the process end, and tidies up.
    """
    process = worker._proc
    if process is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _nothing() -> None:
    """The job of a worker that is only to start."""


def _popen_pool() -> Any:
    """TVM's module of worker processes, which moved after TVM 0.19."""
    try:
        from tvm.support import popen_pool
    except ImportError:
        from tvm.contrib import popen_pool
    return popen_pool


def _reason(exc: BaseException) -> str:
    """The last line of the worker's traceback first, then the whole of it."""
    text = str(exc).strip()
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return f"{last.strip() or type(exc).__name__}\n{text}"
