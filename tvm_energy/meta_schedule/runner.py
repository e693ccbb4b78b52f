"""A runner that spends time where it can matter.

Kernels that a first short run shows to be far slower than the best known get no long timing. That, and
loading a library that the builder already linked, is the difference to the stock local runner; the
latency of every kernel that could win is measured the same way (``EvaluatorConfig``'s defaults).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, PyRunner, RunnerFuture, RunnerResult

from tvm_energy.meta_schedule.history import History
from tvm_energy.meta_schedule.pool import WorkerPool
from tvm_energy.meta_schedule.workers import run_library

RUN_TIMEOUT_S = 60.0

#: A kernel this many times slower than the best of its shape needs no accurate latency.
HOPELESS_FACTOR = 4.0


def argument_infos(args_info: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes as plain data."""
    return [(tuple(int(extent) for extent in info.shape), str(info.dtype)) for info in args_info]


def finished(run_secs: list[float] | None, error: str | None) -> RunnerFuture:
    """A runner future that is done."""
    result = RunnerResult(run_secs, error)
    return RunnerFuture(f_done=lambda: True, f_result=lambda: result)


@derived_object
class PooledRunner(PyRunner):
    """Times candidates in one worker process.

    Args:
        pool: one worker process, so that kernels do not disturb each other.
        history: latencies that need no new run.
        config: MetaSchedule's evaluator configuration.
    """

    def __init__(
        self, pool: WorkerPool, history: History, config: EvaluatorConfig | None = None
    ) -> None:
        super().__init__()
        self.core = _RunnerCore(pool, history, config or EvaluatorConfig())

    def run(self, runner_inputs: list[Any]) -> list[RunnerFuture]:
        """See ``PyRunner.run``."""
        return self.core.run(runner_inputs)


@dataclass
class _RunnerCore:
    pool: WorkerPool
    history: History
    config: EvaluatorConfig
    # Arguments stand for the task here: kernels of one task have the same ones.
    best_s: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def run(self, runner_inputs: list[Any]) -> list[RunnerFuture]:
        futures = []
        for item in runner_inputs:
            recorded = self.history.recorded_latency_s(str(item.artifact_path))
            if recorded is not None:
                futures.append(finished([recorded], None))
            else:
                futures.append(self._time(item))
        return futures

    def _time(self, item: Any) -> RunnerFuture:
        arguments = argument_infos(item.args_info)
        task = tuple(arguments)
        best_s = self.best_s.get(task, float("inf"))
        job = (
            str(item.artifact_path),
            str(item.device_type),
            arguments,
            {
                "number": self.config.number,
                "repeat": self.config.repeat,
                "min_repeat_ms": self.config.min_repeat_ms,
                "hopeless_s": HOPELESS_FACTOR * best_s,
                "seed": 0,
            },
        )
        ((run_secs, error),) = self.pool.map(_run, [job])
        if run_secs is None:
            return finished(None, f"run: {error}")
        self.best_s[task] = min(best_s, sum(run_secs) / len(run_secs))
        return finished(run_secs, None)


def _run(path: str, device_type: str, arguments: Any, options: dict[str, Any]) -> list[float]:
    return run_library(path, device_type, arguments, **options)
