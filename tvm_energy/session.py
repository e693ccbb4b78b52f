"""One tuning run, round by round: gate, predict, decide, measure, learn, rank.

The round follows arXiv:2411.18873 (see ``docs/round.md`` for what is the paper's and what is ours)::

    candidates with latency
          │
       latency gate      keep those that could still be chosen
          │
       predict energy    of the gated ones
          │
       policy            which of them are measured
          │
       measure           on the device
          │
       learn             refit the model, refresh predictions and ranking

Nothing here knows TVM, files of TVM or a device: kernels are keys, features are arrays, and measuring
is a function. A simulation, a GPU and a replayed log run the same code.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tvm_energy.clock_choice import (
    DEFAULT,
    Points,
    TaskKernels,
    check_mode,
    choose_all,
    points_by_workload,
)
from tvm_energy.energy_model.base import KernelModel, Sample
from tvm_energy.measurement import (
    NO_SCATTER,
    EnergyMeasurement,
    MeasurementPlan,
    WindowScatter,
)
from tvm_energy.objective import Objective
from tvm_energy.policy import (
    Feedback,
    Gate,
    Policy,
    PolicyState,
    state_from_json,
    state_to_json,
)
from tvm_energy.ranking import Choice, Kernel, costs, kernels_by_workload, put_final
from tvm_energy.records import (
    CandidateRecord,
    ClockRecord,
    FinalRecord,
    Record,
    RecordLog,
    RoundRecord,
    TaskRecord,
)

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

#: In the first rounds the gate is this much wider, halved with each round, so that the model sees
#: more than the very fastest kernels.
EARLY_SLACK = 0.5

#: Kernels that have run, over all tasks, before predictions lead MetaSchedule's search, whose own cost
#: model waits for 100. Until then a random choice among the offspring of the best kernels finds better ones.
WARM_UP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel that has just been built and timed.

    Attributes:
        key: hash of its schedule trace.
        module: structural hash of its scheduled module.
        features: pooled features, shape (n_features,).
        latency_s: mean seconds a launch, None when it failed.
        error: why it failed.
        measurable: False when there is no artifact to run again.
    """

    key: str
    module: str = ""
    features: Floats
    latency_s: float | None
    error: str | None = None
    measurable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One candidate to be measured.

    Attributes:
        index: in the batch.
        races: the measurement may end as soon as it is clear on which side of `rival_j` it falls.
        rival_j: joules a launch with which the candidate would be as good as the best measured kernel;
            None while there is none.
        scatter: what is known of how windows scatter.
    """

    index: int
    races: bool = False
    rival_j: float | None = None
    scatter: WindowScatter = NO_SCATTER

    def plan(self, plan: MeasurementPlan) -> MeasurementPlan:
        """How this candidate is measured where others are measured by `plan`."""
        if self.races:
            return plan.race(self.rival_j, self.scatter)
        return replace(plan, scatter=self.scatter)


#: Measures one candidate: a measurement, or the reason why there is none.
Measure = Callable[[Order], "EnergyMeasurement | str"]


@dataclass
class _Task:
    """State of one task."""

    name: str = ""
    weight: float = 1.0
    round: int = 0
    kernels: dict[str, Kernel] = field(default_factory=dict)
    features: dict[str, Floats] = field(default_factory=dict)
    points: Points = field(default_factory=dict)
    policy_state: PolicyState | None = None
    best_latency_s: float = float("inf")
    # The best of what was foreseen first, while nothing has run: seconds, and cost in the search.
    foreseen_s: float | None = None
    foreseen_cost: float | None = None


@dataclass(frozen=True, slots=True)
class _Beliefs:
    """What the model says of a batch.

    Attributes:
        energy: joules and their standard error, by key.
        scores: see `Prediction.energy_scores`.
    """

    energy: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scores: Floats = field(default_factory=lambda: np.zeros(0))


class Session:
    """The state of a run over all its tasks.

    Args:
        objective: ranks kernels.
        policy: decides which gated kernels are measured.
        model: predicts latency and energy.
        log: where records go; None keeps nothing on disk.
        rng: source of all randomness.
        on_round: called with the workload hash and the record of each finished round.
        clocks: how clocks are chosen, see `tvm_energy.clock_choice`.
        warm_up: kernels that must have run, over all tasks, before predictions lead the search.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        policy: Policy,
        model: KernelModel,
        log: RecordLog | None = None,
        rng: np.random.Generator | None = None,
        on_round: Callable[[str, RoundRecord], None] = lambda workload, record: None,
        clocks: str = DEFAULT,
        warm_up: int = WARM_UP,
    ) -> None:
        self.objective = objective
        self.policy = policy
        self.model = model
        self.on_round = on_round
        self.clocks = check_mode(clocks)
        self._warm_up = warm_up
        self._log = log
        self._rng = rng if rng is not None else np.random.default_rng(0)
        self._choice_seed = int(self._rng.integers(2**63))
        self._tasks: dict[str, _Task] = {}
        self._choices: dict[str, Choice] | None = None
        self._scatter = NO_SCATTER

    # -- tasks ---------------------------------------------------------------------------------

    def add_task(self, workload: str, name: str, weight: float = 1.0) -> None:
        """Announce a task of this run, once; writes its record."""
        if self._task(workload).name:
            return
        self._task(workload).name = name
        self._task(workload).weight = weight
        self._choices = None
        self._write(TaskRecord(task=name, workload=workload, weight=weight))

    def task_names(self) -> dict[str, str]:
        """Names of the tasks of this run, by workload hash."""
        return {workload: task.name for workload, task in self._tasks.items() if task.name}

    def restore(self, records: Iterable[Record]) -> None:
        """Take over what earlier runs recorded: kernels, clocks, rounds and the policy's state."""
        records = list(records)
        self._choices = None
        for workload, points in points_by_workload(records).items():
            self._task(workload).points.update(points)
        for workload, kernels in kernels_by_workload(records).items():
            task = self._task(workload)
            task.kernels.update(kernels)
            task.best_latency_s = min(kernel.latency_s for kernel in kernels.values())
        for record in records:
            if isinstance(record, CandidateRecord) and record.measured:
                self._scatter += record.measured.scatter
            if isinstance(record, TaskRecord):
                self._task(record.workload).weight = record.weight
            elif isinstance(record, RoundRecord):
                task = self._task(record.workload)
                task.round = max(task.round, record.round + 1)
                if record.policy_state:
                    task.policy_state = state_from_json(record.policy_state)

    def add_features(self, workload: str, features: Mapping[str, Floats]) -> None:
        """Give the features of restored kernels, so that the model can learn from them."""
        self._task(workload).features.update(features)

    def kernels(self, workload: str) -> Mapping[str, Kernel]:
        """All kernels of a task that ran, by key."""
        return self._task(workload).kernels

    # -- the round -----------------------------------------------------------------------------

    def run_round(
        self, workload: str, candidates: Sequence[Candidate], measure: Measure
    ) -> RoundRecord:
        """Take in one batch of timed candidates; see the module's text.

        Args:
            workload: hash of the task's workload.
            candidates: the batch.
            measure: measures a chosen candidate.
        """
        task = self._task(workload)
        self._choices = None
        batch = self._new_candidates(task, candidates)
        for _, candidate in batch:
            if candidate.latency_s is not None:
                task.best_latency_s = min(task.best_latency_s, candidate.latency_s)
        believed = self._predict(workload, [candidate for _, candidate in batch])
        gated = self._gate(task, batch)
        seconds: dict[str, float] = {}

        started = time.perf_counter()
        chosen, measured, failed, feedback = self._measure(
            workload, task, batch, gated, believed, measure
        )
        seconds["measure"] = time.perf_counter() - started
        seconds["measure_device"] = sum(item.device_s for item in measured.values())

        self._take_in(workload, task, batch, believed, measured, failed)
        started = time.perf_counter()
        self.learn()
        seconds["learn"] = time.perf_counter() - started
        return self._close_round(workload, task, batch, gated, chosen, feedback, seconds)

    def _new_candidates(
        self, task: _Task, candidates: Sequence[Candidate]
    ) -> list[tuple[int, Candidate]]:
        """Candidates not met before, with their index in the batch."""
        fresh: dict[str, tuple[int, Candidate]] = {}
        for index, candidate in enumerate(candidates):
            if candidate.key not in task.kernels and candidate.key not in fresh:
                fresh[candidate.key] = (index, candidate)
        return list(fresh.values())

    def _predict(self, workload: str, batch: Sequence[Candidate]) -> _Beliefs:
        """Energies of candidates that ran; empty without a model."""
        ran = [candidate for candidate in batch if candidate.latency_s is not None]
        if not ran or not self.objective.needs_energy:
            return _Beliefs()
        latency_s = np.array([candidate.latency_s for candidate in ran], dtype=np.float64)
        features = np.stack([candidate.features for candidate in ran])
        prediction = self.model.predict(features, workload, latency_s=latency_s)
        if prediction is None or prediction.energy_j is None:
            return _Beliefs()
        errors = prediction.energy_stderr_j
        assert errors is not None
        return _Beliefs(
            {
                candidate.key: (float(energy_j), float(stderr_j))
                for candidate, energy_j, stderr_j in zip(
                    ran, prediction.energy_j, errors, strict=True
                )
            },
            prediction.energy_scores,
        )

    def _gate(self, task: _Task, batch: Sequence[tuple[int, Candidate]]) -> list[int]:
        """Positions in `batch` that pass the latency gate."""
        slack = max(self.objective.slack, EARLY_SLACK * 0.5**task.round)
        limit_s = (1 + slack) * task.best_latency_s
        return [
            position
            for position, (_, candidate) in enumerate(batch)
            if candidate.latency_s is not None
            and candidate.measurable
            and candidate.latency_s <= limit_s
        ]

    def _measure(
        self,
        workload: str,
        task: _Task,
        batch: Sequence[tuple[int, Candidate]],
        gated: Sequence[int],
        believed: _Beliefs,
        measure: Measure,
    ) -> tuple[list[str], dict[str, EnergyMeasurement], dict[str, str], Feedback]:
        """Let the policy choose among the gated, measure, and tell the policy what came out."""
        state = task.policy_state if task.policy_state is not None else self.policy.start()
        if not self.objective.needs_energy or not gated:
            task.policy_state = state
            return [], {}, {}, Feedback()
        keys = [batch[position][1].key for position in gated]
        latency_s = np.array([batch[position][1].latency_s for position in gated], dtype=float)
        rng = self._choice_rng(workload, task)
        asked: list[str] = []
        measured: dict[str, EnergyMeasurement] = {}
        failed: dict[str, str] = {}
        while True:
            gate = self._gate_now(task, keys, latency_s, believed, measured, failed)
            gate = replace(gate, candidates=len(batch))
            tried = measured.keys() | failed.keys()
            choice = dict.fromkeys(self.policy.choose(state, gate, rng))
            chosen = [index for index in choice if keys[index] not in tried]
            asked += [keys[index] for index in chosen]
            for index in chosen:
                outcome = measure(
                    Order(
                        index=batch[gated[index]][0],
                        races=self.policy.races,
                        rival_j=self._rival_j(task, float(latency_s[index]), gate.best_cost),
                        scatter=self._scatter,
                    )
                )
                if isinstance(outcome, EnergyMeasurement):
                    measured[keys[index]] = outcome
                    self._scatter += outcome.scatter
                else:
                    failed[keys[index]] = outcome
            if tried == measured.keys() | failed.keys():
                break
        pairs = [
            (measured[key].energy_j, believed.energy[key][0])
            for key in measured
            if key in believed.energy
        ]
        feedback = Feedback(
            gated=len(gated),
            measured=len(measured),
            measured_j=np.array([pair[0] for pair in pairs]),
            predicted_j=np.array([pair[1] for pair in pairs]),
            earlier_j=np.array(
                [kernel.measured.energy_j for kernel in task.kernels.values() if kernel.measured]
            ),
        )
        task.policy_state = self.policy.update(state, feedback)
        return asked, measured, failed, feedback

    def _choice_rng(self, workload: str, task: _Task) -> np.random.Generator:
        """The policy's source of randomness for one round, so that a replay chooses the same."""
        return np.random.default_rng([self._choice_seed, zlib.crc32(workload.encode()), task.round])

    def _gate_now(
        self,
        task: _Task,
        keys: Sequence[str],
        latency_s: Floats,
        believed: _Beliefs,
        measured: Mapping[str, EnergyMeasurement],
        failed: Mapping[str, str],
    ) -> Gate:
        """The gated candidates as they stand after what was measured so far."""
        beliefs = [believed.energy.get(key) for key in keys]
        done = np.array([key in measured or key in failed for key in keys])
        best_cost = self._least_measured_cost(task, keys, latency_s, measured)
        if any(belief is None for belief in beliefs):
            return Gate(keys=tuple(keys), latency_s=latency_s, best_cost=best_cost, done=done)
        energy_j, stderr_j = np.array(beliefs, dtype=np.float64).reshape(-1, 2).T
        known = [measured.get(key) for key in keys]
        now_j = np.array([m.energy_j if m else e for m, e in zip(known, energy_j, strict=True)])
        error_j = np.array([m.stderr_j if m else e for m, e in zip(known, stderr_j, strict=True)])
        cost = self.objective.cost(latency_s, now_j, task.best_latency_s)
        with np.errstate(invalid="ignore"):  # infinite less infinite: too slow to win either way
            raised = self.objective.cost(latency_s, now_j + error_j, task.best_latency_s) - cost
        return Gate(
            keys=tuple(keys),
            latency_s=latency_s,
            energy_j=energy_j,
            energy_stderr_j=stderr_j,
            cost=cost,
            cost_stderr=np.nan_to_num(raised, nan=0.0, posinf=0.0),
            scores=believed.scores,
            best_cost=best_cost,
            done=done,
        )

    def _least_measured_cost(
        self,
        task: _Task,
        keys: Sequence[str],
        latency_s: Floats,
        measured: Mapping[str, EnergyMeasurement],
    ) -> float:
        earlier = [(k.latency_s, k.energy_j) for k in task.kernels.values() if k.energy_j]
        now = [
            (float(t), measured[key].energy_j)
            for key, t in zip(keys, latency_s, strict=True)
            if key in measured
        ]
        if not earlier and not now:
            return float("inf")
        times, energies = np.array(earlier + now, dtype=np.float64).T
        return float(np.min(self.objective.cost(times, energies, task.best_latency_s)))

    def _rival_j(self, task: _Task, latency_s: float, best_cost: float) -> float | None:
        """Energy with which a kernel of this latency costs as much as the best measured one."""
        if not np.isfinite(best_cost):
            return None
        # Every objective is a straight line in the energy.
        at_0, at_1 = (
            float(self.objective.cost(np.array([latency_s]), np.array([e]), task.best_latency_s)[0])
            for e in (0.0, 1.0)
        )
        if not (np.isfinite(at_1) and np.isfinite(at_0)) or at_1 <= at_0:
            return None
        rival_j = (best_cost - at_0) / (at_1 - at_0)
        return rival_j if rival_j > 0 else None

    def _take_in(
        self,
        workload: str,
        task: _Task,
        batch: Sequence[tuple[int, Candidate]],
        believed: _Beliefs,
        measured: Mapping[str, EnergyMeasurement],
        failed: Mapping[str, str],
    ) -> None:
        """Remember the batch and write its records."""
        for _, candidate in batch:
            key = candidate.key
            energy_j, stderr_j = believed.energy.get(key, (None, None))
            self._write(
                CandidateRecord(
                    workload=workload,
                    key=key,
                    module=candidate.module,
                    round=task.round,
                    latency_s=candidate.latency_s,
                    measured=measured.get(key),
                    predicted_energy_j=energy_j,
                    predicted_stderr_j=stderr_j,
                    error=candidate.error or failed.get(key),
                )
            )
            if candidate.latency_s is not None:
                self._age_finals(task)
                task.features[key] = candidate.features
                task.kernels[key] = Kernel(
                    key=key,
                    latency_s=candidate.latency_s,
                    measured=measured.get(key),
                    predicted_energy_j=energy_j,
                )

    @staticmethod
    def _age_finals(task: _Task) -> None:
        """With a new kernel, earlier finals are no longer the last word."""
        for key, kernel in task.kernels.items():
            if kernel.final:
                task.kernels[key] = replace(kernel, final=False)

    def _close_round(
        self,
        workload: str,
        task: _Task,
        batch: Sequence[tuple[int, Candidate]],
        gated: Sequence[int],
        chosen: Sequence[str],
        feedback: Feedback,
        seconds: dict[str, float],
    ) -> RoundRecord:
        best_latency_s = task.best_latency_s if np.isfinite(task.best_latency_s) else None
        assert task.policy_state is not None
        record = RoundRecord(
            workload=workload,
            round=task.round,
            candidates=len(batch),
            gated=len(gated),
            measured=feedback.measured,
            policy_state=state_to_json(task.policy_state),
            chosen=tuple(chosen),
            snr_db=feedback.snr_db,
            best_latency_s=best_latency_s,
            best_cost=self.best_cost(workload),
            seconds={name: round(value, 6) for name, value in seconds.items()},
        )
        task.round += 1
        self._write(record)
        if self._log is not None:
            self._log.flush()
        self.on_round(workload, record)
        return record

    # -- learning and ranking ------------------------------------------------------------------

    def learn(self) -> None:
        """Refit the model on everything known, and refresh the predictions of unmeasured kernels."""
        samples = [
            Sample(
                group=workload,
                features=task.features[key],
                latency_s=kernel.latency_s,
                energy_j=kernel.energy_j,
            )
            for workload, task in self._tasks.items()
            for key, kernel in task.kernels.items()
            if key in task.features
        ]
        if not samples:
            return
        self.model.fit(samples)
        if self.objective.needs_energy:
            for workload, task in self._tasks.items():
                self._refresh(workload, task)

    def _refresh(self, workload: str, task: _Task) -> None:
        keys = [
            key
            for key, kernel in task.kernels.items()
            if not kernel.measured and key in task.features
        ]
        if not keys:
            return
        prediction = self.model.predict(
            np.stack([task.features[key] for key in keys]),
            workload,
            latency_s=np.array([task.kernels[key].latency_s for key in keys]),
        )
        if prediction is None or prediction.energy_j is None:
            return
        for key, energy_j in zip(keys, prediction.energy_j, strict=True):
            task.kernels[key] = replace(task.kernels[key], predicted_energy_j=float(energy_j))

    def breeds(self, workload: str, parents: int) -> bool:
        """Whether a search gains by changing known kernels: one that chooses that many of them as parents.

        While scores are random and every known kernel would be a parent, nothing is selected, and mutation
        only shuffles random samples.
        """
        return self.leads(workload) or len(self._task(workload).kernels) > parents

    def leads(self, workload: str) -> bool:
        """Whether enough is known for predictions to lead the search; until then scores are random."""
        known = sum(len(each.kernels) for each in self._tasks.values())
        if known >= self._warm_up and self._task(workload).kernels:
            return True
        return self.model.earlier(workload) >= WARM_UP

    def random_scores(self, count: int) -> Floats:
        """Scores for a search that is not led, shape (count,)."""
        return self._rng.random(count)

    def scores(self, workload: str, features: Floats) -> Floats:
        """Score of candidates that have not been built, for the search: higher is better, positive.

        Args:
            workload: hash of the task's workload.
            features: shape (n, n_features).

        Returns:
            Shape (n,): 1 for a kernel predicted as good as the best known, or, while none is, as the
            best of the first call; random unless `leads`.
        """
        task = self._task(workload)
        led = self.leads(workload) and len(features) > 0
        prediction = self.model.predict(features, workload) if led else None
        if prediction is None:
            return self.random_scores(len(features))
        latency_s = prediction.latency_s
        # Latency is known well before energy: until then time stands for energy.
        energy_j = latency_s if prediction.energy_j is None else prediction.energy_j
        if not task.kernels and task.foreseen_s is None:
            task.foreseen_s = float(latency_s.min())
        best_s = task.best_latency_s if task.kernels else task.foreseen_s
        assert best_s is not None
        predicted = self.objective.search_cost(latency_s, energy_j, best_s)
        if not task.kernels:
            # One reference for the whole search, which compares scores of different calls.
            task.foreseen_cost = task.foreseen_cost or float(predicted.min())
            best = task.foreseen_cost
        elif prediction.energy_j is None:
            best = task.best_latency_s
        else:
            best = self._best_search_cost(task)
        return np.clip(best / np.maximum(predicted, 1e-30), 1e-6, 1e3)

    def _best_search_cost(self, task: _Task) -> float:
        keys = list(task.kernels)
        return float(np.min(self._search_costs(task, {k: task.kernels[k].latency_s for k in keys})))

    def _search_costs(self, task: _Task, latency_s: Mapping[str, float]) -> Floats:
        """Smooth cost of kernels by measured, else predicted energy, else typical power x time."""
        times = np.array(list(latency_s.values()))
        power = [k.measured.power_w for k in task.kernels.values() if k.measured is not None]
        typical_w = float(np.median(power)) if power else 1.0
        energy = times * typical_w
        for index, key in enumerate(latency_s):
            kernel = task.kernels.get(key)
            if kernel is not None:
                known = kernel.energy_j or kernel.predicted_energy_j
                energy[index] = known if known is not None else energy[index]
        best_s = min(task.best_latency_s, float(times.min()))
        return self.objective.search_cost(times, energy, best_s)

    def parents(self, workload: str, latency_s: Mapping[str, float]) -> list[str]:
        """Keys in the order in which they should breed, best first.

        Args:
            workload: hash of the task's workload.
            latency_s: seconds a launch by key, of all kernels to be ordered.
        """
        if not latency_s:
            return []
        values = self._search_costs(self._task(workload), latency_s)
        keys = list(latency_s)
        return [keys[index] for index in np.argsort(values, kind="stable")]

    def best_cost(self, workload: str) -> float | None:
        """Cost of the best kernel that could win now; None when there is none."""
        task = self._task(workload)
        pool = [k for k in task.kernels.values() if k.measured or not self.objective.needs_energy]
        if not pool:
            return None
        fastest_s = min(kernel.latency_s for kernel in pool)
        return min(costs(pool, self.objective, fastest_s))

    def expected_cost(self, workload: str) -> float | None:
        """Cost of the best kernel as the search sees it, with predicted energy where none was measured.

        For the task scheduler: a fast kernel that was not worth a measurement is progress too. None while
        no energy is known of the task.
        """
        task = self._task(workload)
        known = [
            kernel
            for kernel in task.kernels.values()
            if not self.objective.needs_energy
            or kernel.energy_j is not None
            or kernel.predicted_energy_j is not None
        ]
        return self._best_search_cost(task) if known else None

    # -- the end -------------------------------------------------------------------------------

    def finalists(self, workload: str, count: int) -> list[str]:
        """Keys of the kernels to be measured again: the best few by the objective, and the fastest.

        Kernels whose energy is only predicted come in too when they are predicted to be better; being
        measured now, they may win.
        """
        task = self._task(workload)
        if not task.kernels:
            return []
        order = self.parents(
            workload, {key: kernel.latency_s for key, kernel in task.kernels.items()}
        )
        fastest = min(task.kernels.values(), key=lambda kernel: kernel.latency_s).key
        chosen = order[: max(1, count)]
        return chosen if fastest in chosen else [*chosen, fastest]

    def finals_done(self, workload: str) -> bool:
        """True when finalists were measured and nothing has been added since."""
        return any(kernel.final for kernel in self._task(workload).kernels.values())

    def record_finals(self, workload: str, results: Mapping[str, EnergyMeasurement]) -> None:
        """Take in the finalists' measurements."""
        task = self._task(workload)
        for key, measured in results.items():
            final = FinalRecord(
                workload=workload, key=key, measured=measured, candidates=len(task.kernels)
            )
            self._write(final)
            put_final(task.kernels, final)
        self._choices = None
        if self._log is not None:
            self._log.flush()

    def finals(self, workload: str) -> dict[str, Kernel]:
        """The finalists that are up to date, by key."""
        kernels = self._task(workload).kernels
        return {key: kernel for key, kernel in kernels.items() if kernel.final}

    def points(self, workload: str) -> Mapping[tuple[str, float], ClockRecord]:
        """Measurements at locked clocks, by key and clock."""
        return self._task(workload).points

    def weight(self, workload: str) -> float:
        """How often the network calls the task."""
        return self._task(workload).weight

    def record_clock(
        self,
        workload: str,
        clock_mhz: float,
        results: Mapping[str, EnergyMeasurement],
        *,
        confirmed: bool = False,
    ) -> None:
        """Take in finalists' measurements at a locked clock."""
        for key, measured in results.items():
            point = ClockRecord(
                workload=workload,
                key=key,
                clock_mhz=clock_mhz,
                measured=measured,
                confirmed=confirmed,
            )
            self._write(point)
            self._task(workload).points[key, clock_mhz] = point
        self._choices = None
        if self._log is not None:
            self._log.flush()

    def choices(self) -> Mapping[str, Choice]:
        """Fastest and chosen kernel of each task, by workload; without tasks in which nothing can win."""
        if self._choices is None:
            tasks = {
                workload: TaskKernels(kernels=task.kernels, points=task.points, weight=task.weight)
                for workload, task in self._tasks.items()
            }
            self._choices = choose_all(tasks, self.objective, self.clocks)
        return self._choices

    def choice(self, workload: str) -> Choice | None:
        """Fastest and chosen kernel of a task; None while nothing can win."""
        return self.choices().get(workload)

    # ------------------------------------------------------------------------------------------

    def _task(self, workload: str) -> _Task:
        return self._tasks.setdefault(workload, _Task())

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log.append(record)
