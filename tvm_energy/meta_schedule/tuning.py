"""Energy-aware tuning: `run` for the command line, `tune_tir`, `tune_relax` and `options` for scripts.

The parts are joined here and nowhere else: device, session, and the objects that MetaSchedule calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

# compat comes first: it refuses a TVM / tvm-ffi pair that would crash.
from tvm_energy.meta_schedule.compat import import_tensor_intrinsics, tensor_intrinsics, versions

# isort: split
from tvm.s_tir import meta_schedule as ms

from tvm_energy import records as rec
from tvm_energy.clock_search import ClockSearch, check_clocks
from tvm_energy.energy_model.prior import Prior
from tvm_energy.errors import ConfigurationError, TvmEnergyError
from tvm_energy.kernels.clock_control import open_clocks
from tvm_energy.kernels.devices import Artifact, MeterChoice
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.callback import EnergyCallback
from tvm_energy.meta_schedule.cost_model import EnergyCostModel, FeatureReader
from tvm_energy.meta_schedule.database import ObjectiveDatabase
from tvm_energy.meta_schedule.device import TuningDevice, open_device
from tvm_energy.meta_schedule.logs import close_loggers, open_loggers
from tvm_energy.meta_schedule.mutation import parent_count, waiting_space
from tvm_energy.meta_schedule.runner import argument_infos
from tvm_energy.meta_schedule.search import ReservoirSearch, check_population
from tvm_energy.meta_schedule.task_scheduler import EnergyTaskScheduler
from tvm_energy.meta_schedule.traces import workload_hash
from tvm_energy.objective import DEFAULT_OBJECTIVE, parse_objective
from tvm_energy.policy import DEFAULT_POLICY
from tvm_energy.progress import Progress, SilentProgress
from tvm_energy.spelling import last_line
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

logger = logging.getLogger(__name__)

#: Kernels of earlier runs whose features are read again, so that the model starts with what it knew.
_RELEARNED_PER_TASK = 256

#: Arguments of the stock tune functions that concern a task's context, not the tuner.
_CONTEXT_OPTIONS = ("space", "special_space", "strategy", "num_tuning_cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """One kernel to tune.

    Attributes:
        name: shown to the user.
        mod: a PrimFunc, or an IRModule with one.
        weight: how often the network calls it.
    """

    name: str
    mod: Any
    weight: float = 1.0


def run(
    tasks: Sequence[TuningTask],
    *,
    device: str | TuningDevice = "auto",
    meter: MeterChoice | None = None,
    work_dir: Path,
    trials: int,
    trials_per_round: int = 64,
    objective: str = DEFAULT_OBJECTIVE,
    policy: str = DEFAULT_POLICY,
    seed: int | None = None,
    plan: MeasurementPlan | None = None,
    finalists: int = DEFAULT_FINALISTS,
    clocks: int | None = None,
    clock_per_kernel: bool = False,
    model: str | Path | None = None,
    prior: Prior = "none",
    target: Any = None,
    population: int | None = None,
    progress: Progress | None = None,
    stock: Mapping[str, Any] | None = None,
) -> ObjectiveDatabase:
    """Tune tasks and leave everything in the work directory.

    Args:
        tasks: what to tune.
        device: see `open_device`; or an open device.
        meter: measures energy in place of the device's own: ``nvml``, ``rapl``, ``zeus``, a meter, or a
            function that opens one (``docs/extending.md``). A device that was given open keeps it.
        work_dir: an earlier run in it, of the same device, is continued.
        trials: candidates tried in all, those of earlier runs in the directory included.
        trials_per_round: candidates a round.
        objective: see `tvm_energy.objective`.
        policy: see `tvm_energy.policy`.
        seed: of the whole run; None draws one.
        plan: how one kernel's energy is measured.
        finalists: kernels of each task that are measured again at the end; 0 for none.
        clocks: locked core clocks at which each finalist is measured at most, so that kernel and clock are
            chosen together (``docs/joint.md``); None leaves the clock to the driver.
        clock_per_kernel: choose a clock for each kernel instead of one for all.
        model: work directory of an earlier run on the same device, or its ``energy_model.json``: the run begins
            with what that one learned (``docs/learning.md``).
        prior: ``counts`` gives the energy model counts of operations and bytes times published energies
            beside the features; ``none`` is the default.
        target: TVM target instead of the device's own.
        population: new candidates that the search looks at each round (`ReservoirSearch`); None for
            `default_population`.
        progress: is told how it goes.
        stock: arguments of MetaSchedule's own ``tune_tir`` that replace what we would use:
            ``builder``, ``runner``, ``cost_model``, ``database``, ``space``, ``strategy``, ...

    Raises:
        ConfigurationError: a wrong argument.
        MeterUnavailable: the objective needs energy, and the device has no meter.
        ClockUnavailable: ``clocks`` is given, and the device's clock cannot be locked.
        WorkDirError, RecordFormatError: the work directory cannot be used.
        Interrupted: Ctrl-C.
    """
    check_counts(tasks, trials, trials_per_round, finalists)
    _check_clocks(clocks, clock_per_kernel, finalists, objective)
    stock = dict(stock or {})
    if population is not None:
        check_population(population)
        if "strategy" in stock:
            raise ConfigurationError(
                "population= is that of tvm_energy's own search; leave it out, or strategy="
            )
    with locked_work_dir(Path(work_dir)), _opened(device, target, meter) as opened:
        opened.start_workers()
        engine = _Engine.open(
            opened,
            Path(work_dir),
            objective=objective,
            policy=policy,
            seed=seed,
            plan=plan,
            progress=progress or SilentProgress(),
            database=stock.pop("database", None),
            clocks=clocks,
            clock_per_kernel=clock_per_kernel,
            model=model,
            prior=prior,
        )
        stock.setdefault("strategy", ReservoirSearch(engine.session, population))
        try:
            engine.tune(tasks, trials, trials_per_round, stock)
            engine.measure_finalists(finalists)
            engine.measure_clocks()
        finally:
            engine.progress.finished()
            engine.log.close()
            close_loggers()
            engine.save_model()
        return engine.database


def evolutionary_search(population: int) -> Any:
    """MetaSchedule's evolutionary search with another population than its 512.

    It wants 50 new valid schedules to begin with, however small the population is; where few samples are
    valid (convolutions on a GPU), gathering them takes most of the time. A quarter of the population
    is enough. It also gives up after five fruitless batches of the population's size; the number is
    raised so that a small population does not give up earlier.
    """
    if population < 1:
        raise ConfigurationError(f"population must be at least 1, got {population}")
    return ms.search_strategy.EvolutionarySearch(
        population_size=population,
        init_min_unmeasured=max(1, min(50, population // 4)),
        max_fail_count=5 * max(1, 512 // population),
    )


def _check_clocks(
    clocks: int | None, clock_per_kernel: bool, finalists: int, objective: str
) -> None:
    if clocks is not None:
        needs_energy = parse_objective(objective, max_power_w=1.0).needs_energy
        check_clocks(clocks, finalists, needs_energy)
    elif clock_per_kernel:
        raise ConfigurationError("a clock for each kernel needs the number of clocks to measure at")


@contextlib.contextmanager
def _opened(
    device: str | TuningDevice, target: Any, meter: MeterChoice | None
) -> Iterator[TuningDevice]:
    opened = open_device(device, target) if isinstance(device, str) else device
    try:
        if meter is not None:
            opened.use_meter(meter)
        yield opened
    finally:
        if isinstance(device, str):
            opened.close()


@dataclass(kw_only=True)
class _Engine(TuningRun):
    """The joined parts of one run."""

    device: TuningDevice
    database: Any
    progress: Progress
    clocks: int | None = None

    @classmethod
    def open(
        cls,
        device: TuningDevice,
        work_dir: Path,
        *,
        objective: str,
        policy: str,
        seed: int | None,
        plan: MeasurementPlan | None,
        progress: Progress,
        database: Any = None,
        clocks: int | None = None,
        clock_per_kernel: bool = False,
        model: str | Path | None = None,
        prior: Prior = "none",
    ) -> _Engine:
        """Join the parts and take over what the work directory holds."""
        if clocks is not None:
            # Found out now and not after hours of search.
            open_clocks(device, try_out=True)
        run = open_run(
            device,
            work_dir,
            objective=objective,
            policy=policy,
            seed=seed,
            plan=plan,
            progress=progress,
            versions=versions(),
            tuner="meta_schedule",
            clocks=clocks,
            clock_per_kernel=clock_per_kernel,
            model=model,
            prior=prior,
        )
        device.history.add(
            {r.module: r.latency_s for r in run.tried if r.module and r.latency_s is not None}
        )
        if not isinstance(database, ms.database.Database):
            database = ms.database.JSONDatabase(work_dir=str(work_dir))
        return cls(
            **vars(run),
            device=device,
            database=ObjectiveDatabase(database, run.session),
            progress=progress,
            clocks=clocks,
        )

    def parts(self) -> dict[str, Any]:
        """What MetaSchedule is given, by the names of its arguments."""
        return {
            "builder": self.device.builder,
            "runner": self.device.runner,
            "database": self.database,
            "cost_model": EnergyCostModel(self.session),
            # Ours stands before the stock callback that removes the artifacts.
            "measure_callbacks": [
                ms.measure_callback.AddToDatabase(),
                EnergyCallback(self.session, self.device, self.plan),
                ms.measure_callback.RemoveBuildArtifact(),
            ],
            "task_scheduler": EnergyTaskScheduler(
                self.session, stop=lambda: self.stop.requested, seed=self.seed
            ),
        }

    # -- searching -----------------------------------------------------------------------------

    def tune(
        self, tasks: Sequence[TuningTask], trials: int, per_round: int, stock: Mapping[str, Any]
    ) -> None:
        """Search; a task that makes TVM fail is set aside, and the others go on."""
        names = {workload_hash(normalized(task.mod)): task.name for task in tasks}
        done = len(self.tried)
        left = {workload_hash(normalized(task.mod)): task for task in tasks}

        def on_round(workload: str, record: rec.RoundRecord) -> None:
            nonlocal done
            done += record.candidates
            self.progress.round_finished(names.get(workload, workload), record, done)

        self.session.on_round = on_round
        self.progress.started(
            [task.name for task in tasks], trials, self._device_name(), len(self.tried)
        )
        for workload, task in left.items():
            self.session.add_task(workload, task.name, float(task.weight))
        self._say_resumed(trials)
        with tensor_intrinsics(self.device.target), self.stop.listening(self.progress):
            self._relearn(left)
            while left and done < trials and not self.stop.requested:
                failed = self._search(left, trials - done, per_round, stock)
                if failed is None:
                    break
                del left[failed]
        if self.stop.requested:
            raise Interrupted(
                f"stopped after {done} of {trials} trials; the same command continues from there"
            )

    def _device_name(self) -> str:
        """The name by which the user knows the device."""
        simulated = self.device.spec.startswith("sim:")
        return self.device.spec if simulated else str(self.device.identity["name"])

    def _search(
        self, tasks: dict[str, TuningTask], trials: int, per_round: int, stock: Mapping[str, Any]
    ) -> str | None:
        """One call of MetaSchedule's tuner; the workload of the task that failed, or None."""
        contexts = self._contexts(tasks, stock)
        if not contexts:
            return None
        order = list(contexts)
        arguments = self.parts() | {k: v for k, v in stock.items() if k not in _CONTEXT_OPTIONS}
        try:
            ms.tune_tasks(
                tasks=[contexts[workload] for workload in order],
                task_weights=[float(tasks[workload].weight) for workload in order],
                work_dir=str(self.log.path.parent),
                max_trials_global=trials,
                num_trials_per_iter=per_round,
                **arguments,
            )
        except TvmEnergyError:
            raise
        except Exception as exc:
            picker = getattr(arguments["task_scheduler"], "picker", None)
            if picker is None or picker.last is None:
                raise
            workload = order[picker.last]
            self._set_aside(workload, tasks[workload].name, exc)
            return workload
        return None

    def _contexts(self, tasks: dict[str, TuningTask], stock: Mapping[str, Any]) -> dict[str, Any]:
        """Tune contexts of the tasks whose design space can be generated."""
        contexts: dict[str, Any] = {}
        loggers = open_loggers(self.log.path.parent, [task.name for task in tasks.values()])
        seeds = ms.utils.fork_seed(self.seed, n=len(tasks))
        special = stock.get("special_space") or {}
        for (workload, task), task_logger, seed in zip(
            list(tasks.items()), loggers, seeds, strict=True
        ):
            try:
                mod = normalized(task.mod)
                space = special.get(task.name, stock.get("space", "post-order-apply"))
                strategy = stock["strategy"]
                if isinstance(strategy, str):
                    strategy = ms.search_strategy.SearchStrategy.create(strategy)
                parents = parent_count(strategy)
                if space == "post-order-apply" and parents is not None:
                    ready = partial(self.session.breeds, workload, parents)
                    space = waiting_space(mod, self.device.target, ready)
                context = ms.TuneContext(
                    mod=mod,
                    target=self.device.target,
                    space_generator=space,
                    search_strategy=strategy,
                    task_name=task.name,
                    rand_state=seed,
                    num_threads=stock.get("num_tuning_cores", "logical"),
                    logger=task_logger,
                ).clone()
                if not context.generate_design_space():
                    raise ValueError("the design space is empty")
            except Exception as exc:
                self._set_aside(workload, task.name, exc)
                continue
            contexts[workload] = context
        return contexts

    def _set_aside(self, workload: str, name: str, exc: Exception) -> None:
        """Record why a task cannot be tuned (any further)."""
        reason = last_line(exc)
        logger.debug("task %s failed", name, exc_info=exc)
        self.progress.message(f"task {name} is left out: {reason}")
        self.log.append(
            rec.CandidateRecord(
                workload=workload, key="", round=0, latency_s=None, error=f"schedule: {reason}"
            )
        )
        self.log.flush()

    def _say_resumed(self, trials: int) -> None:
        if self.tried:
            self.progress.message(resumed_message(len(self.tried), trials))

    def _relearn(self, tasks: dict[str, TuningTask]) -> None:
        """Read the features of earlier runs' best kernels again and fit the model to them."""
        reader = FeatureReader()
        for workload in tasks:
            kernels = self.session.kernels(workload)
            if not kernels:
                continue
            order = self.session.parents(workload, {k: v.latency_s for k, v in kernels.items()})
            measured = [key for key in order if kernels[key].measured]
            keys = list(dict.fromkeys(measured + order))[:_RELEARNED_PER_TASK]
            found = {key: self.database.core.record(workload, key) for key in keys}
            rows = [(key, record) for key, record in found.items() if record is not None]
            if not rows:
                continue
            context = ms.TuneContext(mod=normalized(tasks[workload].mod), target=self.device.target)
            features = reader(context, [record.as_measure_candidate() for _, record in rows])
            self.session.add_features(
                workload, {key: row for (key, _), row in zip(rows, features, strict=True)}
            )
        if self.tried:
            self.session.learn()

    # -- finalists -----------------------------------------------------------------------------

    def measure_finalists(self, count: int) -> None:
        """Measure the best few of each task again, with long, interleaved windows."""
        if count == 0 or self.device.meter is None:
            return
        for workload, name in self.session.task_names().items():
            if not self.wants_finals(workload):
                continue
            keys = self.session.finalists(workload, count)
            if not keys:
                continue
            self.progress.finals_started(name)
            self.session.record_finals(workload, self._measure_again(workload, keys))

    def measure_clocks(self) -> None:
        """Measure the finalists at a few locked clocks, so that kernel and clock are chosen together."""
        if self.clocks is None or self.device.meter is None:
            return
        control, clock_mhz = open_clocks(self.device)
        artifacts: dict[str, dict[str, Artifact]] = {}

        def measure(
            workload: str, keys: Sequence[str], long: bool
        ) -> dict[str, EnergyMeasurement | str]:
            built = artifacts.setdefault(workload, {})
            built |= self._build_again(workload, [key for key in keys if key not in built])
            there = [key for key in keys if key in built]
            plan = finalist_plan(self.plan) if long else self.plan
            results = self.device.measure([built[key] for key in there], plan) if there else []
            return dict(zip(there, results, strict=True))

        ClockSearch(
            self.session,
            clock_mhz,
            self.clocks,
            locked=control.locked,
            measure=measure,
            power_limit_w=self.device.max_power_w,
            message=self.progress.message,
        ).run()

    def _build_again(self, workload: str, keys: Sequence[str]) -> dict[str, Artifact]:
        artifacts: dict[str, Artifact] = {}
        for key in keys:
            record = self.database.core.record(workload, key)
            if record is None:
                continue
            candidate = record.as_measure_candidate()
            path, error = self.device.builder.core.build_again(
                candidate.sch.mod, self.device.target
            )
            if path is None:
                self.progress.message(f"a finalist could not be built again: {error}")
                continue
            artifacts[key] = Artifact(path=path, arguments=argument_infos(candidate.args_info))
        return artifacts

    def _measure_again(self, workload: str, keys: Sequence[str]) -> dict[str, EnergyMeasurement]:
        artifacts = self._build_again(workload, keys)
        if not artifacts:
            return {}
        results = self.device.measure(list(artifacts.values()), finalist_plan(self.plan))
        for result in results:
            if isinstance(result, str):
                self.progress.message(f"a finalist could not be measured: {result}")
        return {
            key: result
            for key, result in zip(artifacts, results, strict=True)
            if isinstance(result, EnergyMeasurement)
        }


def normalized(mod: Any) -> Any:
    """An IRModule with the single function ``main``, as MetaSchedule makes of every task."""
    return ms.tune_context._normalize_mod(mod)


# -- for scripts -------------------------------------------------------------------------------


def tune_tir(
    mod: Any,
    target: Any,
    work_dir: str | Path,
    max_trials_global: int,
    *,
    num_trials_per_iter: int = 64,
    seed: int | None = None,
    objective: str = DEFAULT_OBJECTIVE,
    policy: str = DEFAULT_POLICY,
    device: str | TuningDevice = "auto",
    meter: MeterChoice | None = None,
    plan: MeasurementPlan | None = None,
    finalists: int = DEFAULT_FINALISTS,
    clocks: int | None = None,
    clock_per_kernel: bool = False,
    model: str | Path | None = None,
    prior: Prior = "none",
    population: int | None = None,
    progress: Progress | None = None,
    **stock: Any,
) -> ObjectiveDatabase:
    """Energy-aware counterpart of ``meta_schedule.tune_tir``; same arguments, ours added.

    Args:
        mod: a PrimFunc, or an IRModule of PrimFuncs.
        target: TVM target.
        work_dir: an earlier run of the same device in it is continued.
        max_trials_global: trials in all, those of earlier runs in `work_dir` included.
        num_trials_per_iter: candidates a round.
        seed: of the whole run.
        objective, policy, meter, plan, finalists, clocks, clock_per_kernel, model, prior, population,
            progress: see `run`.
        device: ``auto`` follows the target: this CPU for ``llvm``, an NVIDIA GPU for ``cuda`` where
            there is one, else ``sim:a100``.
        stock: further arguments of the stock function.

    Returns:
        The database; works in ``with database:``, ``compile_tir`` and ``MetaScheduleApplyDatabase``.
    """
    functions = [(v.name_hint, f) for v, f in _primfuncs(mod)]
    tasks = [TuningTask(name=name, mod=function) for name, function in sorted(functions, key=_name)]
    return run(
        tasks,
        device=_device_for(device, target),
        meter=meter,
        target=target,
        work_dir=Path(work_dir),
        trials=max_trials_global,
        trials_per_round=num_trials_per_iter,
        objective=objective,
        policy=policy,
        seed=seed,
        plan=plan,
        finalists=finalists,
        clocks=clocks,
        clock_per_kernel=clock_per_kernel,
        model=model,
        prior=prior,
        population=population,
        progress=progress,
        stock=_without_post_optimization(stock),
    )


def tune_relax(
    mod: Any,
    params: Any,
    target: Any,
    work_dir: str | Path,
    max_trials_global: int,
    max_trials_per_task: int | None = None,
    op_names: Sequence[str] | None = None,
    *,
    num_trials_per_iter: int = 64,
    seed: int | None = None,
    module_equality: str = "structural",
    objective: str = DEFAULT_OBJECTIVE,
    policy: str = DEFAULT_POLICY,
    device: str | TuningDevice = "auto",
    meter: MeterChoice | None = None,
    plan: MeasurementPlan | None = None,
    finalists: int = DEFAULT_FINALISTS,
    clocks: int | None = None,
    clock_per_kernel: bool = False,
    model: str | Path | None = None,
    prior: Prior = "none",
    population: int | None = None,
    progress: Progress | None = None,
    **stock: Any,
) -> ObjectiveDatabase:
    """Energy-aware counterpart of ``meta_schedule.tune_relax``; see `tune_tir`."""
    import tvm

    extracted = ms.relax_integration.extract_tasks(
        mod, tvm.target.Target(target), params, module_equality=module_equality
    )
    tasks = [
        TuningTask(name=str(task.task_name), mod=task.dispatched[0], weight=float(task.weight))
        for task in extracted
        if not op_names or any(name in str(task.task_name) for name in op_names)
    ]
    if max_trials_per_task is not None:
        stock["max_trials_per_task"] = max_trials_per_task
    return run(
        tasks,
        device=_device_for(device, target),
        meter=meter,
        target=target,
        work_dir=Path(work_dir),
        trials=max_trials_global,
        trials_per_round=num_trials_per_iter,
        objective=objective,
        policy=policy,
        seed=seed,
        plan=plan,
        finalists=finalists,
        clocks=clocks,
        clock_per_kernel=clock_per_kernel,
        model=model,
        prior=prior,
        population=population,
        progress=progress,
        stock=stock,
    )


class Options(dict[str, Any]):
    """Arguments for a stock tune function; made by `options`.

    As a context manager it measures the finalists at the end and releases the device and the work
    directory; otherwise call `close`.
    """

    def __init__(
        self, engine: _Engine, strategy: str | None, finalists: int, cleanup: contextlib.ExitStack
    ) -> None:
        super().__init__(engine.parts())
        if strategy is not None:
            self["strategy"] = ReservoirSearch(engine.session)
        self._engine = engine
        self._finalists = finalists
        self._cleanup = cleanup

    def measure_finalists(self) -> None:
        """Measure the best few kernels of each task again, and at other clocks where asked for.

        The database then ranks these.
        """
        self._engine.measure_finalists(self._finalists)
        self._engine.measure_clocks()

    def close(self) -> None:
        """Release the device and the work directory."""
        self._cleanup.close()

    def __enter__(self) -> Options:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self.measure_finalists()
        finally:
            self.close()


def options(
    target: Any,
    work_dir: str | Path,
    *,
    objective: str = DEFAULT_OBJECTIVE,
    policy: str = DEFAULT_POLICY,
    device: str | TuningDevice = "auto",
    meter: MeterChoice | None = None,
    seed: int | None = None,
    plan: MeasurementPlan | None = None,
    finalists: int = DEFAULT_FINALISTS,
    clocks: int | None = None,
    clock_per_kernel: bool = False,
    model: str | Path | None = None,
    prior: Prior = "none",
    strategy: Literal["reservoir"] | None = "reservoir",
) -> Options:
    """Arguments that make a stock ``tune_tir`` or ``tune_relax`` call energy-aware.

    ::

        with tvm_energy.options(target, work_dir, objective="edp") as parts:
            database = ms.tune_tir(mod, target, work_dir, 1000, **parts)

    Args:
        target: TVM target of the tune call.
        work_dir: of the tune call.
        objective, policy, device, meter, seed, plan, finalists, clocks, clock_per_kernel, model, prior: see `run`.
        strategy: ``reservoir`` is tvm_energy's own search (`ReservoirSearch`); None leaves the search to the
            stock function, or to the ``strategy`` that the script itself gives it.

    Raises:
        ConfigurationError: a wrong argument.
    """
    if strategy not in ("reservoir", None):
        raise ConfigurationError(
            f"strategy must be 'reservoir' or None, got {strategy!r}; with None, give another one to the "
            "stock function"
        )
    _check_clocks(clocks, clock_per_kernel, finalists, objective)
    cleanup = contextlib.ExitStack()
    try:
        cleanup.enter_context(locked_work_dir(Path(work_dir)))
        opened = cleanup.enter_context(_opened(_device_for(device, target), target, meter))
        engine = _Engine.open(
            opened,
            Path(work_dir),
            objective=objective,
            policy=policy,
            seed=seed,
            plan=plan,
            progress=SilentProgress(),
            clocks=clocks,
            clock_per_kernel=clock_per_kernel,
            model=model,
            prior=prior,
        )
        cleanup.callback(engine.log.close)
        cleanup.callback(engine.save_model)
        import_tensor_intrinsics()
    except BaseException:
        cleanup.close()
        raise
    return Options(engine, strategy, finalists, cleanup)


def _primfuncs(mod: Any) -> list[tuple[Any, Any]]:
    from tvm import tirx

    if isinstance(mod, tirx.PrimFunc):
        mod = normalized(mod)
    return [(v, f) for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]


def _name(item: tuple[str, Any]) -> str:
    return item[0]


def _device_for(device: str | TuningDevice, target: Any) -> str | TuningDevice:
    """``auto`` follows the target's kind."""
    import tvm

    if device == "auto" and tvm.target.Target(target).kind.name == "llvm":
        return "cpu"
    return device


def _without_post_optimization(stock: dict[str, Any]) -> dict[str, Any]:
    if stock.get("post_optimization"):
        raise ConfigurationError(
            "post_optimization=True is not supported: its droplet search looks at latency only"
        )
    return {k: v for k, v in stock.items() if k not in ("post_optimization", "module_equality")}
