from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator

import cloudpickle
import pytest

from tvm_energy.kernels.pool import WorkerPool


def job(what: str) -> str:
    if what == "crash":
        os._exit(9)
    if what == "hang":
        time.sleep(600)
    if what == "deaf":
        # Holds the interpreter's lock, so that the worker cannot see to its own time limit.
        ctypes.PyDLL(None).sleep(600)
    if what == "raise":
        raise ValueError("no such schedule")
    return f"{what} {os.environ.get('TVM_ENERGY_TEST', '')}"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    # Workers cannot import this file.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = WorkerPool(1, timeout_s=20, environment={"TVM_ENERGY_TEST": "set"})
    yield pool
    pool.close()


def test_a_crash_a_hang_and_an_exception_cost_one_job_each(pool: WorkerPool) -> None:
    pool.map(job, [("warm",)])
    outcomes = pool.map(job, [("one",), ("crash",), ("two",), ("raise",), ("hang",), ("three",)])
    values = [value for value, _ in outcomes]
    reasons = [reason for _, reason in outcomes]
    assert values == ["one set", None, "two set", None, None, "three set"]
    assert reasons[1] == "crash: the worker process died"
    assert reasons[3] is not None
    assert reasons[3].startswith("ValueError: no such schedule")
    assert reasons[4] == "timeout: killed after 20 s"


def test_a_worker_that_cannot_keep_its_time_limit_is_killed_from_outside(pool: WorkerPool) -> None:
    pool.map(job, [("warm",)])
    usual, pool.deadline_s = pool.deadline_s, 2.0
    try:
        ((value, reason),) = pool.map(job, [("deaf",)])
    finally:
        pool.deadline_s = usual
    assert value is None
    assert reason == "timeout: the worker did not answer for 2 s"
    assert pool.map(job, [("after",)]) == [("after set", None)]


def test_close_ends_running_jobs_and_drops_the_others(pool: WorkerPool) -> None:
    other = WorkerPool(1, timeout_s=600)
    other.start()
    outcomes: list[tuple[str | None, str | None]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            outcomes.extend(other.map(job, [("hang",), ("hang",)]))
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    while not any(worker.is_alive() for worker in other._workers):
        time.sleep(0.05)
    other.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert [type(exc).__name__ for exc in failed] == ["CancelledError"]
    assert not any(worker.is_alive() for worker in other._workers)
