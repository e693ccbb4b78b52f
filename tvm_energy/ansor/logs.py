"""Ansor's log and our energy records side by side.

The log holds what stock Ansor writes, seconds and all; stock Ansor reads it. The energy of its
programs lies in ``database_energy_record.json`` in the same directory, joined by what a line says (`tvm_energy.ansor_log`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tvm_energy.ansor_log import LOG_FILE, read_log
from tvm_energy.errors import ConfigurationError, WorkDirError
from tvm_energy.replay import RunSummary, summarize


def apply_best(
    task: Any,
    log: str | Path,
    objective: str | None = None,
    layout_rewrite_option: Any = None,
) -> tuple[Any, Any]:
    """Energy-aware counterpart of ``SearchTask.apply_best``.

    Args:
        task: the ``SearchTask``.
        log: a work directory of `tvm_energy.ansor.tune`, or the Ansor log in one.
        objective: see `tvm_energy.objective`; None for that of the last run.
        layout_rewrite_option: as in Ansor; None for the task's own.

    Returns:
        A ``te.Schedule`` and its tensors, for ``tvm.lower`` and ``tvm.build``.

    Raises:
        WorkDirError: there is no log, or no energy records beside it.
        ConfigurationError: no kernel of this task is on record, or none can be chosen.
    """
    from tvm_energy.ansor.compat import load_auto_scheduler

    load_auto_scheduler()
    from tvm.auto_scheduler.measure import recover_measure_input
    from tvm.auto_scheduler.measure_record import load_record_from_string

    from tvm_energy.ansor.names import workload_of

    work_dir, file = _paths(log)
    workload = workload_of(task)
    line = _chosen_lines(file, summarize(work_dir, objective)).get(workload)
    if line is None:
        raise ConfigurationError(
            f"{file} has no chosen kernel for task {task.desc or task.workload_key} "
            f"on target {task.target}; tune it first"
        )
    measure_input, _ = load_record_from_string(line)
    program = recover_measure_input(measure_input)
    schedule, tensors = task.compute_dag.apply_steps_from_state(
        program.state, layout_rewrite_option or task.layout_rewrite_option
    )
    return schedule, tensors


def export_log(
    log: str | Path, out: str | Path, objective: str | None = None, *, replace: bool = False
) -> int:
    """Write a stock Ansor log in which stock ``apply_best`` finds our choice of each task.

    It holds one line a task, as Ansor wrote it. Needs no TVM.

    Args:
        log: a work directory of `tvm_energy.ansor.tune`, or the Ansor log in one.
        out: the file to write; must not exist.
        objective: see `tvm_energy.objective`; None for that of the last run.
        replace: `out` may be an earlier log, which is replaced.

    Returns:
        The number of tasks.

    Raises:
        WorkDirError: there is no log, no energy records beside it, or `out` cannot be written.
        ConfigurationError: no kernel could be chosen.
    """
    work_dir, file = _paths(log)
    lines = list(_chosen_lines(file, summarize(work_dir, objective)).values())
    if not lines:
        raise ConfigurationError(f"{file} holds no kernel that could be chosen; tune first")
    target = Path(out)
    try:
        with target.open("w" if replace else "x", encoding="utf-8") as stream:
            stream.writelines(lines)
    except FileExistsError as exc:
        raise WorkDirError(
            f"{target} exists; choose another file, or replace it (--force)"
        ) from exc
    except OSError as exc:
        raise WorkDirError(f"cannot write {target}: {exc.strerror}") from exc
    return len(lines)


def _chosen_lines(file: Path, summary: RunSummary) -> dict[str, str]:
    """The lines of the chosen kernels by workload."""
    chosen = {task.workload: task.best.key for task in summary.tasks if task.best}
    found: dict[str, str] = {}
    for workload, key, line in read_log(file):
        if chosen.get(workload) == key:
            found.setdefault(workload, line)
    return found


def _paths(log: str | Path) -> tuple[Path, Path]:
    """Work directory and Ansor log."""
    path = Path(log)
    file = path / LOG_FILE if path.is_dir() else path
    if not os.path.isfile(file):
        raise WorkDirError(f"{file} does not exist; give a work directory of tvm_energy.ansor.tune")
    return file.parent, file
