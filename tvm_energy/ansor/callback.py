"""The measure callback: where a batch that Ansor has built and timed enters the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_energy.ansor.compat import load_auto_scheduler

# isort: split
from tvm.auto_scheduler.measure import PythonBasedMeasureCallback

from tvm_energy.ansor.cost_model import read_features
from tvm_energy.ansor.device import AnsorDevice
from tvm_energy.ansor.names import names_of, readable_name
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.session import Candidate, Order, Session

load_auto_scheduler()


class EnergyMeasureCallback(PythonBasedMeasureCallback):
    """Runs one round of the session for each batch that Ansor has measured.

    Ansor measures in batches of twice the ``n_parallel`` of its builder; a round of the session is a
    round of the search when that is not less than ``num_measures_per_round``.

    Args:
        session: the run.
        device: measures the kernels that were built inside `measuring_on`.
        plan: how one kernel is measured.
    """

    def __init__(self, session: Session, device: AnsorDevice, plan: MeasurementPlan) -> None:
        super().__init__()
        self._session = session
        self._device = device
        self._plan = plan

    def callback(self, policy: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """See ``PythonBasedMeasureCallback.callback``."""
        if not len(inputs):
            return
        task = inputs[0].task
        names = [names_of(item) for item in inputs]
        features, _ = read_features(task, [item.state for item in inputs])
        workload = names[0][0]
        self._session.add_task(workload, readable_name(task))
        batch = [
            _candidate(key, result, row, measurable=(workload, key) in self._device.artifacts)
            for (_, key), result, row in zip(names, results, features, strict=True)
        ]

        def measure(order: Order) -> EnergyMeasurement | str:
            artifact = self._device.artifacts[names[order.index]]
            return self._device.measure([artifact], order.plan(self._plan))[0]

        self._session.run_round(workload, batch, measure)
        self._device.forget()


def _candidate(key: str, result: Any, features: Any, *, measurable: bool) -> Candidate:
    """Plain data from Ansor's objects."""
    failed = int(result.error_no) != 0
    run_secs = [float(getattr(value, "value", value)) for value in result.costs]
    error = str(result.error_msg or "").strip().splitlines()
    return Candidate(
        key=key,
        features=features,
        latency_s=None if failed else sum(run_secs) / len(run_secs),
        error=(error[0][:300] if error else f"error {int(result.error_no)}") if failed else None,
        measurable=measurable,
    )
