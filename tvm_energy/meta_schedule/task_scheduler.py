"""Which task of a network gets the next round: where its cost, energy included, can still fall most.

MetaSchedule's gradient scheduler (Ansor, OSDI'20, section 6) does this for latency. Here the same
rule sees the cost of the best kernel under the objective, with predicted energy where none was measured,
weighted by the call count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.task_scheduler import PyTaskScheduler

from tvm_energy.meta_schedule.traces import workload_hash
from tvm_energy.session import Session


@derived_object
class EnergyTaskScheduler(PyTaskScheduler):
    """Gives the next round to the task with the steepest expected fall of weighted cost.

    Args:
        session: knows the best cost of each task.
        stop: asked before each round; True ends the tuning cleanly.
        seed: of the random choice among tasks.
    """

    def __init__(
        self, session: Session, stop: Callable[[], bool] = lambda: False, seed: int = 0
    ) -> None:
        super().__init__()
        self.session = session
        self.stop = stop
        self.picker = TaskPicker(np.random.default_rng(seed))

    def next_task_id(self) -> int:
        """See ``PyTaskScheduler.next_task_id``; -1 ends the tuning."""
        scheduler = self._outer()
        tasks = scheduler.tasks_
        for index, task in enumerate(tasks):
            if task.runner_futures is not None and not task.is_terminated:
                scheduler.join_running_task(index)
        if self.stop():
            return -1
        alive = [not task.is_terminated for task in tasks]
        costs = [self._weighted_cost(task) for task in tasks]
        return self.picker.pick(alive, costs)

    def _weighted_cost(self, task: Any) -> float:
        cost = self.session.expected_cost(workload_hash(task.ctx.mod))
        return float("inf") if cost is None else cost * float(task.task_weight)


class TaskPicker:
    """The gradient rule, as plain arithmetic.

    First every task has one round. Then the gradient of a task is ``alpha`` x (fall over the last
    ``window`` rounds, a round) + (1 - ``alpha``) x (cost / rounds so far), the second term being the
    optimistic guess that the cost may fall to nothing; the task with the largest is chosen.

    Args:
        rng: breaks ties.
        alpha: weight of the past against the guess, as in Ansor.
        window: rounds looked back, as in Ansor.
    """

    def __init__(self, rng: np.random.Generator, alpha: float = 0.2, window: int = 3) -> None:
        self._rng = rng
        self._alpha = alpha
        self._window = window
        self._last: int | None = None
        self._history: dict[int, list[float]] = {}

    @property
    def last(self) -> int | None:
        """The task that was picked last; None before the first."""
        return self._last

    def pick(self, alive: list[bool], costs: list[float]) -> int:
        """Index of the next task, or -1 when none is alive.

        Args:
            alive: which tasks can still go on.
            costs: weighted best cost of each task now; infinite while it has no valid kernel.
        """
        if self._last is not None:
            self._history.setdefault(self._last, []).append(costs[self._last])
        candidates = [index for index, flag in enumerate(alive) if flag]
        if not candidates:
            return -1
        untried = [index for index in candidates if index not in self._history]
        if untried:
            self._last = untried[0]
        else:
            gradients = np.array([self._gradient(self._history[index]) for index in candidates])
            best = np.flatnonzero(gradients == gradients.max())
            self._last = candidates[int(self._rng.choice(best))]
        return self._last

    def _gradient(self, history: list[float]) -> float:
        now = history[-1]
        if not np.isfinite(now):
            # No valid kernel yet: one more try is worth more than anything, but not for ever.
            return float("inf") if len(history) < 3 else 0.0
        past = history[max(0, len(history) - 1 - self._window)]
        fall = past - now if np.isfinite(past) else 0.0
        steps = max(1, min(self._window, len(history) - 1))
        return self._alpha * fall / steps + (1 - self._alpha) * now / len(history)
