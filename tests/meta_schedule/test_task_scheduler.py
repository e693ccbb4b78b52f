from __future__ import annotations

import numpy as np

from tvm_energy.meta_schedule.task_scheduler import TaskPicker


def play(picker: TaskPicker, curves: list[list[float]], rounds: int) -> list[int]:
    """Pick tasks whose weighted cost falls along `curves`, one step a round; returns the picks."""
    steps = [0] * len(curves)
    costs = [float("inf")] * len(curves)
    picks = []
    for _ in range(rounds):
        pick = picker.pick([True] * len(curves), list(costs))
        picks.append(pick)
        costs[pick] = curves[pick][min(steps[pick], len(curves[pick]) - 1)]
        steps[pick] += 1
    return picks


def test_every_task_has_one_round_first() -> None:
    picks = play(TaskPicker(np.random.default_rng(0)), [[1.0], [100.0], [10.0]], 3)
    assert picks == [0, 1, 2]


def test_the_expensive_task_gets_most_rounds() -> None:
    picks = play(TaskPicker(np.random.default_rng(0)), [[1.0], [100.0], [10.0]], 30)
    assert picks.count(1) > picks.count(2) > picks.count(0)


def test_a_task_that_still_falls_beats_one_that_stands_still() -> None:
    falling = [100.0 - 5 * step for step in range(20)]
    picks = play(TaskPicker(np.random.default_rng(0), alpha=0.9), [[100.0], falling], 20)
    assert picks.count(1) > 14


def test_a_task_without_kernels_is_tried_again_but_not_for_ever() -> None:
    picks = play(TaskPicker(np.random.default_rng(0)), [[float("inf")], [1.0]], 20)
    assert 2 <= picks.count(0) <= 3


def test_no_task_alive_ends_the_tuning() -> None:
    assert TaskPicker(np.random.default_rng(0)).pick([False, False], [1.0, 2.0]) == -1


def test_terminated_tasks_are_left_alone() -> None:
    picker = TaskPicker(np.random.default_rng(0))
    picks = [picker.pick([False, True], [1000.0, 1.0]) for _ in range(5)]
    assert picks == [1] * 5
