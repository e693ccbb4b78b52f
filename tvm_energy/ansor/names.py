"""Names of tasks and kernels, taken from the content of Ansor's own log lines.

A line of an Ansor log holds, under ``"i"``, the task and the transform steps of one program. Their
hashes are the workload and the key in our energy records, so the two files are joined by what the
line says, not by its place; lines may be sorted, merged or taken out.
"""

from __future__ import annotations

import json
from typing import Any

from tvm_energy.errors import RecordFormatError
from tvm_energy.json_lines import json_hash, parse_line


def names_of_line(line: str) -> tuple[str, str]:
    """Workload and key of a line of an Ansor log.

    Raises:
        RecordFormatError: it is not such a line.
    """
    value = parse_line(line)
    try:
        task, state = value["i"]
        return json_hash([task[0], task[1]]), json_hash(state[1])
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordFormatError("not a record of an Ansor log") from exc


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
