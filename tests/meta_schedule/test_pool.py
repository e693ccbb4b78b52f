from __future__ import annotations

import os
import sys
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
