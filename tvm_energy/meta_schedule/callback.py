"""The measure callback: where a batch that MetaSchedule has built and timed enters the session."""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

from tvm_energy.kernels.devices import Artifact
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.builder import module_hash
from tvm_energy.meta_schedule.cost_model import FeatureReader
from tvm_energy.meta_schedule.device import TuningDevice
from tvm_energy.meta_schedule.runner import argument_infos
from tvm_energy.meta_schedule.traces import trace_key, workload_hash
from tvm_energy.session import Candidate, Order, Session


@derived_object
class EnergyCallback(PyMeasureCallback):
    """Runs one round of the session; must stand before the stock callback that removes artifacts.

    Args:
        session: the run.
        device: measures artifacts.
        plan: how one kernel is measured.
    """

    def __init__(self, session: Session, device: TuningDevice, plan: MeasurementPlan) -> None:
        super().__init__()
        self.core = _Core(session, device, plan)

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: Any,
        builder_results: Any,
        runner_results: Any,
    ) -> None:
        """See ``PyMeasureCallback.apply``."""
        task = task_scheduler.tasks_[task_id]
        name = str(task.ctx.task_name)
        self.core.session.add_task(workload_hash(task.ctx.mod), name, float(task.task_weight))
        self.core.apply(task.ctx, measure_candidates, builder_results, runner_results)


class _Core:
    def __init__(self, session: Session, device: TuningDevice, plan: MeasurementPlan) -> None:
        self.session = session
        self._device = device
        self._plan = plan
        self._features = FeatureReader()

    def apply(self, context: Any, candidates: Any, builds: Any, runs: Any) -> None:
        if len(candidates) == 0:
            return
        features = self._features(context, candidates)
        batch = [
            _candidate(self._device, candidate, build, run, row)
            for candidate, build, run, row in zip(candidates, builds, runs, features, strict=True)
        ]

        def measure(order: Order) -> EnergyMeasurement | str:
            artifact = Artifact(
                path=str(builds[order.index].artifact_path),
                arguments=argument_infos(candidates[order.index].args_info),
            )
            return self._device.measure([artifact], order.plan(self._plan))[0]

        self.session.run_round(workload_hash(context.mod), batch, measure)


def _candidate(
    device: TuningDevice, candidate: Any, build: Any, run: Any, features: Any
) -> Candidate:
    """Plain data from TVM's objects."""
    path = None if build.artifact_path is None else str(build.artifact_path)
    run_secs = [float(value) for value in run.run_secs or ()]
    recorded = path is not None and device.history.recorded_latency_s(path) is not None
    error = build.error_msg or run.error_msg
    module = "" if path is None else device.history.module_of(path)
    return Candidate(
        key=trace_key(candidate.sch.trace),
        module=module or module_hash(candidate.sch.mod),
        features=features,
        latency_s=sum(run_secs) / len(run_secs) if run_secs else None,
        error=None if error is None else str(error).strip().splitlines()[0][:300],
        measurable=not recorded,
    )
