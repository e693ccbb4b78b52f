"""Tests with a real Ansor; scripts/test runs them in the environment of scripts/ansor-environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_energy.ansor.compat import load_auto_scheduler

# Without an Ansor nothing here can run, and that is a failure.
load_auto_scheduler()

from tvm import auto_scheduler  # noqa: E402

from tvm_energy import ansor  # noqa: E402

SMALL_SEARCH = {
    "evolutionary_search_population": 16,
    "evolutionary_search_num_iters": 2,
    "sample_init_min_population": 4,
}
MATMUL = "matmul:m=64,n=64,k=64"


def trials(number: int, per_round: int, **others) -> auto_scheduler.TuningOptions:
    return auto_scheduler.TuningOptions(
        num_measure_trials=number, num_measures_per_round=per_round, verbose=0, **others
    )


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """A finished run over a matmul, a matvec and a conv2d on the simulated A100: directory and tasks."""
    work_dir = tmp_path_factory.mktemp("simulated")
    specs = (MATMUL, "matvec:m=64,k=64", "conv2d:n=1,ci=8,co=8,h=14,w=14,kernel=3,padding=1")
    tasks = [ansor.workload_task(spec, device="sim:a100") for spec in specs]
    ansor.tune(
        tasks,
        trials(36, 6),
        work_dir=work_dir,
        device="sim:a100",
        policy="all",
        task_weights=[1, 2, 1],
        search_policy_params=SMALL_SEARCH,
        finalists=2,
        seed=1,
    )
    return work_dir, tasks
