"""Names of tasks and kernels of a search: those that their lines in Ansor's log have (`tvm_energy.ansor_log`)."""

from __future__ import annotations

import json
from typing import Any

from tvm_energy.ansor_log import names_of_line


def names_of(measure_input: Any) -> tuple[str, str]:
    """Workload and key of a ``MeasureInput``."""
    return names_of_line(line_of(measure_input, _no_result()))


def workload_of(task: Any) -> str:
    """Workload of a ``SearchTask``."""
    from tvm.auto_scheduler.measure import MeasureInput

    return names_of(MeasureInput(task, task.compute_dag.init_state))[0]


def line_of(measure_input: Any, result: Any) -> str:
    """The line that stock Ansor writes for a measured program."""
    from tvm.auto_scheduler.measure_record import dump_record_to_string

    return str(dump_record_to_string(measure_input, result)).strip()


def readable_name(task: Any) -> str:
    """A task's description, else ``matmul(256, 256, float32)`` for ``["matmul", 256, 256, "float32"]``."""
    if task.desc:
        return str(task.desc)
    try:
        name, *arguments = json.loads(task.workload_key)
    except ValueError:
        return str(task.workload_key)
    return f"{name}({', '.join(map(str, arguments))})"


def _no_result() -> Any:
    from tvm.auto_scheduler.measure import MeasureResult

    return MeasureResult([0.0], 0, "", 0.0, 0.0)
