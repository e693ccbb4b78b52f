"""Energy-aware tuning with Ansor: `tune`.

The parts are joined here: device, session, and the objects that Ansor calls. Ansor's own task
scheduler drives the rounds, of one task too.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_energy.ansor.compat import load_auto_scheduler, versions

# isort: split
from tvm import auto_scheduler
from tvm.auto_scheduler.measure import MeasureInput, MeasureResult, recover_measure_input
from tvm.auto_scheduler.measure_record import load_record_from_string

from tvm_energy.ansor.callback import EnergyMeasureCallback
from tvm_energy.ansor.cost_model import EnergyCostModel, read_features
from tvm_energy.ansor.device import AnsorDevice, check_tasks, open_device
from tvm_energy.ansor.measuring import FAILED_S, measuring_on
from tvm_energy.ansor.names import line_of, names_of, readable_name, workload_of
from tvm_energy.ansor_log import LOG_FILE, read_log
from tvm_energy.energy_model.prior import Prior
from tvm_energy.errors import ConfigurationError
from tvm_energy.json_lines import repair_tail
from tvm_energy.kernels.devices import MeterChoice
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.objective import DEFAULT_OBJECTIVE
from tvm_energy.policy import DEFAULT_POLICY
from tvm_energy.progress import Progress, SilentProgress
from tvm_energy.records import RoundRecord
from tvm_energy.replay import RunSummary, summarize
from tvm_energy.tuning_run import (
    DEFAULT_FINALISTS,
    Interrupted,
    TuningRun,
    check_counts,
    finalist_plan,
    open_run,
    resumed_message,
)
from tvm_energy.work_dir import locked_work_dir

load_auto_scheduler()

#: Kernels of earlier runs whose features are read again, so that the model starts with what it knew.
_RELEARNED_PER_TASK = 256

#: Predictions lead the search as soon as there are any. With MetaSchedule's warm-up no prediction ever led a
#: run of 32 trials, and its kernels were far worse than those of stock Ansor learning from its first batch.
_WARM_UP = 0


def tune(
    task: Any,
    tuning_options: Any = None,
    *,
    work_dir: str | Path,
    objective: str = DEFAULT_OBJECTIVE,
    policy: str = DEFAULT_POLICY,
    device: str | AnsorDevice = "auto",
    meter: MeterChoice | None = None,
    task_weights: Sequence[float] | None = None,
    search_policy_params: Mapping[str, Any] | None = None,
    seed: int | None = None,
    plan: MeasurementPlan | None = None,
    finalists: int = DEFAULT_FINALISTS,
    model: str | Path | None = None,
    prior: Prior = "none",
    progress: Progress | None = None,
) -> RunSummary:
    """Energy-aware counterpart of ``SearchTask.tune`` and ``TaskScheduler.tune``.

    Args:
        task: a ``SearchTask``, or a sequence of them.
        tuning_options: Ansor's ``TuningOptions``. Used are ``num_measure_trials`` (trials in all, those of
            earlier runs in `work_dir` included), ``num_measures_per_round``, ``early_stopping``,
            ``measure_callbacks``, and the settings of a ``LocalRunner``.
        work_dir: where Ansor's log and our records go; an earlier run of the same device in it is
            continued.
        objective: see `tvm_energy.objective`.
        policy: which candidates have their energy measured, see `tvm_energy.policy`.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, a GPU's UUID, ``sim:NAME``, or an open device; it brings
            a meter. ``auto`` follows the target: this CPU for ``llvm``, an NVIDIA GPU for ``cuda`` where
            there is one, else ``sim:a100``.
        meter: measures energy in place of the device's own: ``nvml``, ``rapl``, ``zeus``, a meter, or a
            function that opens one (``docs/extending.md``). A device that was given open keeps it.
        task_weights: how often the network calls each task; 1 each by default.
        search_policy_params: of Ansor's ``SketchPolicy``.
        seed: of the whole run; None draws one.
        plan: how one kernel's energy is measured.
        finalists: kernels of each task that are measured again at the end; 0 for none.
        model: work directory of an earlier run of this tuner on the same device, or its
            ``energy_model.json``: the run begins with what that one learned.
        prior: ``counts`` gives the energy model counts of operations and bytes times published energies
            beside the features.
        progress: is told how it goes.

    Returns:
        The outcome, as ``tvm-energy report`` shows it; `apply_best` gives the schedule.

    Raises:
        ConfigurationError: a wrong argument.
        MeterUnavailable: the objective needs energy, and the device has no meter.
        WorkDirError, RecordFormatError: the work directory cannot be used.
        Interrupted: Ctrl-C.
    """
    tasks = list(task) if isinstance(task, (list, tuple)) else [task]
    options = tuning_options if tuning_options is not None else auto_scheduler.TuningOptions()
    trials = int(options.num_measure_trials)
    check_counts(tasks, trials, int(options.num_measures_per_round), finalists)
    weights = list(task_weights) if task_weights is not None else [1.0] * len(tasks)
    if len(weights) != len(tasks):
        raise ConfigurationError(f"{len(tasks)} tasks need as many weights, got {len(weights)}")
    by_workload = {workload_of(item): item for item in tasks}
    if len(by_workload) != len(tasks):
        raise ConfigurationError("two of the tasks are the same; give one of them with more weight")
    folder = Path(work_dir)
    with locked_work_dir(folder), _opened(device, tasks[0].target, meter) as opened:
        check_tasks(opened, by_workload)
        opened.start_workers()
        run = open_run(
            opened,
            folder,
            objective=objective,
            policy=policy,
            seed=seed,
            plan=plan,
            progress=progress or SilentProgress(),
            versions=versions(),
            model=model,
            prior=prior,
            tuner="ansor",
            warm_up=_WARM_UP,
        )
        try:
            engine = _Engine(
                opened, run, by_workload, weights, options, progress or SilentProgress()
            )
            with measuring_on(opened):
                engine.search(dict(search_policy_params or {}))
            engine.measure_finalists(finalists)
        finally:
            run.log.close()
            if progress is not None:
                progress.finished()
            run.save_model()
    return summarize(folder)


@contextlib.contextmanager
def _opened(
    device: str | AnsorDevice, target: Any, meter: MeterChoice | None
) -> Iterator[AnsorDevice]:
    opened = open_device(device, target) if isinstance(device, str) else device
    try:
        if meter is not None:
            opened.use_meter(meter)
        yield opened
    finally:
        if isinstance(device, str):
            opened.close()


class _Engine:
    """The joined parts of one run."""

    def __init__(
        self,
        device: AnsorDevice,
        run: TuningRun,
        tasks: Mapping[str, Any],
        weights: Sequence[float],
        options: Any,
        progress: Progress,
    ) -> None:
        self.device = device
        self.run = run
        self.tasks = tasks
        self.weights = weights
        self.options = options
        self.progress = progress
        self.log_file = run.log.path.parent / LOG_FILE
        self.model = EnergyCostModel(run.session)
        repair_tail(self.log_file)

    # -- searching -----------------------------------------------------------------------------

    def search(self, params: dict[str, Any]) -> None:
        """Let Ansor's task scheduler give rounds to the tasks until all trials are used."""
        trials, resumed = int(self.options.num_measure_trials), len(self.run.tried)
        names = {workload: readable_name(task) for workload, task in self.tasks.items()}
        done = resumed

        def on_round(workload: str, record: RoundRecord) -> None:
            nonlocal done
            done += record.candidates
            self.progress.round_finished(names.get(workload, workload), record, done)

        self.run.session.on_round = on_round
        self.progress.started(list(names.values()), trials, self._device_name(), resumed)
        for (workload, name), weight in zip(names.items(), self.weights, strict=True):
            self.run.session.add_task(workload, name, float(weight))
        if resumed:
            self.progress.message(resumed_message(resumed, trials))
            self._relearn()
        if done >= trials:
            return
        with self.run.stop.listening(self.progress):
            self._scheduler().tune(
                self._options(trials - done), search_policy=self._policies(params)
            )
        if self.run.stop.requested:
            raise Interrupted(
                f"stopped after {done} of {trials} trials; the same call continues from there"
            )

    def _device_name(self) -> str:
        simulated = self.device.spec.startswith("sim:")
        return self.device.spec if simulated else str(self.device.identity["name"])

    def _scheduler(self) -> Any:
        weights = list(self.weights)
        return auto_scheduler.TaskScheduler(
            list(self.tasks.values()),
            objective_func=lambda costs: sum(c * w for c, w in zip(costs, weights, strict=True)),
            callbacks=[],
        )

    def _options(self, trials: int) -> Any:
        """The user's options, with our builder's batch, log and callback in them."""
        per_round = int(self.options.num_measures_per_round)
        runner = self.options.runner
        if not isinstance(runner, auto_scheduler.LocalRunner):
            runner = auto_scheduler.LocalRunner()
        return auto_scheduler.TuningOptions(
            num_measure_trials=max(trials, len(self.tasks)),
            early_stopping=int(self.options.early_stopping),
            num_measures_per_round=per_round,
            verbose=0,
            # Ansor measures in batches of twice this number; one batch is to be a whole round.
            builder=auto_scheduler.LocalBuilder(n_parallel=math.ceil(per_round / 2)),
            runner=runner,
            measure_callbacks=[
                auto_scheduler.RecordToFile(str(self.log_file)),
                EnergyMeasureCallback(self.run.session, self.device, self.run.plan),
                *(self.options.measure_callbacks or ()),
            ],
        )

    def _policies(self, params: dict[str, Any]) -> list[Any]:
        return [
            _ObjectivePolicy(
                task, workload, self.model, self.run, self.log_file, params, self.run.seed + index
            )
            for index, (workload, task) in enumerate(self.tasks.items())
        ]

    def _relearn(self) -> None:
        """Read the features of earlier runs' best kernels again and fit the model to them."""
        lines = {(workload, key): line for workload, key, line in read_log(self.log_file)}
        session = self.run.session
        for workload, task in self.tasks.items():
            kernels = session.kernels(workload)
            order = session.parents(workload, {k: v.latency_s for k, v in kernels.items()})
            measured = [key for key in order if kernels[key].measured]
            keys = [
                key
                for key in list(dict.fromkeys(measured + order))[:_RELEARNED_PER_TASK]
                if (workload, key) in lines
            ]
            if keys:
                states = [recovered(lines[workload, key]).state for key in keys]
                features, _ = read_features(task, states)
                session.add_features(workload, dict(zip(keys, features, strict=True)))
        session.learn()

    # -- finalists -----------------------------------------------------------------------------

    def measure_finalists(self, count: int) -> None:
        """Measure the best few of each task again, with long, interleaved windows."""
        if count == 0 or self.device.meter is None or not self.log_file.exists():
            return
        lines = {(workload, key): line for workload, key, line in read_log(self.log_file)}
        for workload in self.tasks:
            if not self.run.wants_finals(workload):
                continue
            keys = [
                key
                for key in self.run.session.finalists(workload, count)
                if (workload, key) in lines
            ]
            if keys:
                self.progress.finals_started(readable_name(self.tasks[workload]))
                programs = [recovered(lines[workload, key]) for key in keys]
                results = self._measure_again(programs)
                self.run.session.record_finals(workload, results)

    def _measure_again(self, programs: Sequence[Any]) -> dict[str, EnergyMeasurement]:
        for error in self.device.build(programs):
            if error is not None:
                self.progress.message(f"a finalist could not be built again: {error}")
        names = [names_of(program) for program in programs]
        built = {
            name[1]: self.device.artifacts[name] for name in names if name in self.device.artifacts
        }
        if not built:
            return {}
        results = self.device.measure(list(built.values()), finalist_plan(self.run.plan))
        self.device.forget()
        for result in results:
            if isinstance(result, str):
                self.progress.message(f"a finalist could not be measured: {result}")
        return {
            key: result
            for key, result in zip(built, results, strict=True)
            if isinstance(result, EnergyMeasurement)
        }


class _ObjectivePolicy(auto_scheduler.search_policy.SearchPolicy):
    """One task's search as Ansor's task scheduler sees it, ranked by the objective.

    Ansor's C++ takes a program's time for its worth in two places: when it picks measured programs as
    parents of the next round, and when the task scheduler weighs the tasks. Times in the log stay
    true, so both are told otherwise here: each round is searched by a new ``SketchPolicy`` that is given
    the measured programs in the order of the objective, and the scheduler is handed the cost of the
    task's best kernel.
    """

    def __init__(
        self,
        task: Any,
        workload: str,
        model: EnergyCostModel,
        run: TuningRun,
        log_file: Path,
        params: dict[str, Any],
        seed: int,
    ) -> None:
        self._task = task
        self._workload = workload
        self._model = model
        self._run = run
        self._log_file = log_file
        self._params = params
        self._seed = seed
        self._round = 0

    def continue_search_one_round(self, num_measure: int, measurer: Any) -> tuple[Any, Any]:
        """See ``SearchPolicy.continue_search_one_round``; nothing once a stop was requested."""
        if self._run.stop.requested:
            return [], []
        inputs, results = self._search_policy().continue_search_one_round(num_measure, measurer)
        cost = self._run.session.expected_cost(self._workload)
        value = FAILED_S if cost is None else float(cost)
        return inputs, [MeasureResult([value], 0, "", 0.0, 0.0) for _ in results]

    def _search_policy(self) -> Any:
        self._round += 1
        with tempfile.TemporaryDirectory(prefix="tvm_energy_") as folder:
            ranked = Path(folder) / "ranked.json"
            ranked.write_text("".join(self._ranked_lines()), encoding="utf-8")
            return auto_scheduler.SketchPolicy(
                self._task,
                self._model,
                params=dict(self._params),
                # Ansor takes 0 for "random".
                seed=1 + (self._seed * 1_000_003 + self._round) % (2**30),
                verbose=0,
                init_search_callbacks=[auto_scheduler.PreloadMeasuredStates(str(ranked))],
            )

    def _ranked_lines(self) -> Iterator[str]:
        """The programs on record, their place in the objective's order in place of their time."""
        session = self._run.session
        kernels = session.kernels(self._workload)
        order = session.parents(self._workload, {k: v.latency_s for k, v in kernels.items()})
        place = {key: float(index + 1) for index, key in enumerate(order)}
        for workload, key, line in read_log(self._log_file):
            if workload == self._workload:
                measure_input, _ = load_record_from_string(line)
                known = key in place
                result = MeasureResult([place.get(key, FAILED_S)], 0 if known else 8, "", 0.0, 0.0)
                yield line_of(measure_input, result) + "\n"


def recovered(line: str) -> MeasureInput:
    """The program of a line of an Ansor log, complete."""
    measure_input, _ = load_record_from_string(line)
    return recover_measure_input(measure_input, rebuild_state=True)
