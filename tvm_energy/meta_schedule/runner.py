"""A runner that keeps its worker process; see `tvm_energy.kernels.timing`."""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, PyRunner, RunnerFuture, RunnerResult

from tvm_energy.kernels.history import History
from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.kernels.timing import KernelTimer


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


class _RunnerCore:
    def __init__(self, pool: WorkerPool, history: History, config: EvaluatorConfig) -> None:
        self._timer = KernelTimer(pool)
        self._history = history
        self._config = config

    def run(self, runner_inputs: list[Any]) -> list[RunnerFuture]:
        futures = []
        for item in runner_inputs:
            recorded = self._history.recorded_latency_s(str(item.artifact_path))
            if recorded is not None:
                futures.append(finished([recorded], None))
            else:
                futures.append(self._time(item))
        return futures

    def _time(self, item: Any) -> RunnerFuture:
        run_secs, error = self._timer.time(
            str(item.artifact_path),
            str(item.device_type),
            argument_infos(item.args_info),
            number=self._config.number,
            repeat=self._config.repeat,
            min_repeat_ms=self._config.min_repeat_ms,
        )
        return finished(run_secs, None if run_secs is not None else f"run: {error}")
