"""The search's decisions again, round by round, from a log: as they were, or under another policy.

The rounds of the log go through `Session.run_round`, the code that a real run goes through, with recorded
latencies, recorded predictions, and recorded energies in place of the device. Two uses:

*Reproduce* (no policy given). Every figure that a round derives is worked out again from raw latency and
energy and compared with the log: gate, signal-to-noise ratio, state of the policy, best latency and
cost. Since version 2 of the format a policy's random choices come from the run's seed, the task and the
round, so that the choice itself is checked too; in older logs it is taken as recorded.

*Study* (a policy is given). The policy decides anew. Where it wants a kernel whose energy the log does not
have, the kernel stays unmeasured and is counted as missing: only a run with ``--policy all`` has every
answer. Predictions stay those of the recorded run, whose model learned from all that was measured
*there*; a policy that measures less would have had a somewhat worse one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tvm_energy.energy_model.base import Floats, Prediction, Sample
from tvm_energy.logs.load import Log, comparable
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.objective import Objective, parse_objective
from tvm_energy.policy import Feedback, Gate, Policy, PolicyState, parse_policy
from tvm_energy.ranking import Choice, choose, costs, kernels_by_workload
from tvm_energy.records import CandidateRecord, Header, Record, RoundRecord, TaskRecord
from tvm_energy.records import to_json as record_json
from tvm_energy.replay import Source, max_power_w
from tvm_energy.session import Candidate, Order, Session

#: Figures that differ by less than this part are the same: sums may be taken in another order.
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round.

    Attributes:
        run: which run of the log, from 1.
        task: its name.
        record: what the round came to now; its ``seconds`` are those of the replay.
        missing: chosen kernels whose energy the log does not have.
        differences: ``figure: now, recorded`` for every figure that is not what the log says; empty in
            a study, where they are meant to differ.
    """

    run: int
    task: str
    record: RoundRecord
    missing: int
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy found for one task, beside the best that the log's measurements allow.

    Attributes:
        name, workload: of the task.
        best, reference: the choices; None where nothing can win.
        regret: cost(best) / cost(reference) - 1; None without both, or where `best` is slower than the
            objective allows.
    """

    name: str
    workload: str
    best: Choice | None
    reference: Choice | None
    regret: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReplay:
    """A replay as a whole.

    Attributes:
        policy, objective: their specs.
        recorded: the decisions are those of the log, checked; False for a study.
        simulated: whether the log's last run says so.
        choices_checked: rounds whose choice itself could be reproduced.
        steps: in the order of the log.
        tasks: outcomes of a study; finalists' measurements are left out on both sides.
        candidates, gated, measured, missing: sums over the rounds.
        device_s: device time of the energy measurements (virtual on a simulated device).
        device_s_recorded: the same for everything the log has from its rounds.
    """

    policy: str
    objective: str
    recorded: bool
    simulated: bool
    choices_checked: int
    steps: tuple[Step, ...]
    tasks: tuple[Outcome, ...]
    candidates: int
    gated: int
    measured: int
    missing: int
    device_s: float
    device_s_recorded: float

    @property
    def differences(self) -> int:
        """Figures that are not what the log says."""
        return sum(len(step.differences) for step in self.steps)


def replay_policy(
    source: Source,
    policy: str | None = None,
    objective: str | None = None,
    *,
    seed: int | None = None,
) -> PolicyReplay:
    """Replay the rounds of a log; see the module's text.

    Args:
        source: work directory, record file or records; only read.
        policy: studied; None reproduces the decisions on record.
        objective: by default that of the log. Another one makes it a study.
        seed: of the studied policy's random choices; by default that of the log.

    Raises:
        ConfigurationError: policy or objective are not known.
        WorkDirError, RecordFormatError: see `tvm_energy.replay.summarize`.
    """
    log = Log.of(source)
    records = list(log.read())
    if policy is None and objective is None:
        return _reproduce(records, log.header)
    return _study(records, log.header, policy, objective, seed)


def _reproduce(records: Sequence[Record], last: Header) -> PolicyReplay:
    names = _names(records)
    steps: list[Step] = []
    checked = 0
    for run, start, lines in _runs(records):
        header = lines[0]
        assert isinstance(header, Header)
        earlier, _ = comparable(records[:start], header)
        known = {r.module for r in earlier if isinstance(r, CandidateRecord) and r.latency_s}
        policy = _AsRecorded(parse_policy(header.policy))
        player = _Player(_objective(header.objective, header), policy, header.seed, known)
        player.session.restore(earlier)
        for batch, recorded in _rounds(lines):
            if recorded is None:
                continue  # the run was interrupted before this round was over
            policy.follow(recorded, batch)
            step = player.play(batch, run, names)
            found = tuple(_differences(step.record, recorded, policy))
            checked += recorded.chosen is not None
            steps.append(replace(step, differences=found))
    return _result(steps, records, last.policy, last.objective, recorded=True, checked=checked)


def _study(
    records: Sequence[Record],
    last: Header,
    policy: str | None,
    objective: str | None,
    seed: int | None,
) -> PolicyReplay:
    chosen_policy = parse_policy(policy or last.policy)
    chosen_objective = _objective(objective or last.objective, last)
    lines, _ = comparable(records, last)
    names = _names(lines)
    player = _Player(
        chosen_objective, chosen_policy, last.seed if seed is None else seed, known=set()
    )
    steps = [player.play(batch, 1, names) for batch, _ in _rounds(lines)]
    every = kernels_by_workload(r for r in lines if isinstance(r, CandidateRecord))
    outcomes = tuple(
        _outcome(
            name,
            workload,
            player.session.choice(workload),
            choose(every.get(workload, {}).values(), chosen_objective),
            chosen_objective,
        )
        for workload, name in names.items()
    )
    return _result(steps, lines, chosen_policy.spec, chosen_objective.spec, tasks=outcomes)


def _objective(spec: str, header: Header) -> Objective:
    return parse_objective(spec, max_power_w=max_power_w(header))


def _names(records: Iterable[Record]) -> dict[str, str]:
    """Names of the tasks by workload; a workload that no task line names stands for itself."""
    names: dict[str, str] = {}
    for record in records:
        if isinstance(record, TaskRecord):
            names[record.workload] = record.task
        elif isinstance(record, CandidateRecord):
            names.setdefault(record.workload, record.workload)
    return names


def _runs(records: Sequence[Record]) -> Iterator[tuple[int, int, Sequence[Record]]]:
    """Number from 1, position and records of each run."""
    starts = [index for index, record in enumerate(records) if isinstance(record, Header)]
    for number, (start, end) in enumerate(pairwise([*starts, len(records)]), start=1):
        yield number, start, records[start:end]


def _rounds(
    records: Iterable[Record],
) -> Iterator[tuple[list[CandidateRecord], RoundRecord | None]]:
    """Batches of candidates with the record that closed their round; None where it is missing."""
    open_rounds: dict[str, list[CandidateRecord]] = {}
    for record in records:
        if isinstance(record, CandidateRecord) and record.key:
            open_rounds.setdefault(record.workload, []).append(record)
        elif isinstance(record, RoundRecord):
            batch = open_rounds.pop(record.workload, [])
            if batch:
                yield batch, record
    for batch in open_rounds.values():
        yield batch, None


class _Recorded:
    """A kernel model that says what the recorded run's model said; features are row numbers."""

    def __init__(self) -> None:
        self.rows: list[CandidateRecord] = []

    def earlier(self, group: str) -> int:
        """See `KernelModel.earlier`."""
        return 0

    def fit(self, samples: Sequence[Sample]) -> None:
        """See `KernelModel.fit`; what was believed is on record."""

    def predict(
        self, features: Floats, group: str, latency_s: Floats | None = None
    ) -> Prediction | None:
        """See `KernelModel.predict`; None where one of the kernels has no prediction on record."""
        rows = [self.rows[int(row)] for row in features[:, 0]]
        energy_j = [row.predicted_energy_j for row in rows]
        stderr_j = [row.predicted_stderr_j for row in rows]
        if latency_s is None or None in energy_j or None in stderr_j:
            return None
        return Prediction(
            latency_s=latency_s,
            energy_j=np.array(energy_j, dtype=np.float64),
            energy_stderr_j=np.array(stderr_j, dtype=np.float64),
        )

    def save(self, path: str | Path) -> None:
        """See `KernelModel.save`; the log itself is what could be saved."""
        raise NotImplementedError("a replay learns nothing that could be saved")

    def load(self, path: str | Path) -> None:
        """See `KernelModel.load`."""
        raise NotImplementedError("a replay takes its predictions from the log")


class _AsRecorded:
    """Asks a policy, and then does what the log says was done.

    Attributes:
        own: keys that the policy itself chose in the last round.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: tuple[str, ...] = ()
        self.own: tuple[str, ...] = ()

    @property
    def races(self) -> bool:
        """See `Policy.races`; recorded energies take no time."""
        return False

    @property
    def spec(self) -> str:
        """See `Policy.spec`."""
        return self._policy.spec

    def follow(self, recorded: RoundRecord, batch: Sequence[CandidateRecord]) -> None:
        """Choose next what this round chose."""
        self.own = ()
        if recorded.chosen is not None:
            self._keys = recorded.chosen
        else:  # version 1: whatever was measured, or failed to be
            ran = (record for record in batch if record.latency_s is not None)
            self._keys = tuple(record.key for record in ran if record.measured or record.error)

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return self._policy.start()

    def choose(self, state: PolicyState, gate: Gate, rng: np.random.Generator) -> list[int]:
        """See `Policy.choose`; what the policy itself chooses is only noted."""
        own = [gate.keys[index] for index in self._policy.choose(state, gate, rng)]
        self.own += tuple(own)
        # As many as the policy asked for now; once it asks for nothing, what the log has beyond that.
        count = len(own) or len(self._keys)
        now, self._keys = self._keys[:count], self._keys[count:]
        return [gate.keys.index(key) for key in now if key in gate.keys]

    def update(self, state: PolicyState, feedback: Feedback) -> PolicyState:
        """See `Policy.update`."""
        return self._policy.update(state, feedback)


class _Player:
    """A session that is fed from a log.

    Args:
        known: hashes of modules on record before the run; it had no artifacts of them to measure.
    """

    def __init__(
        self, objective: Objective, policy: Policy, seed: int, known: Container[str]
    ) -> None:
        self._model = _Recorded()
        self._known = known
        self.session = Session(
            objective=objective,
            policy=policy,
            model=self._model,
            rng=np.random.default_rng(abs(seed)),
        )

    def play(self, batch: Sequence[CandidateRecord], run: int, names: Mapping[str, str]) -> Step:
        """One round."""
        first = len(self._model.rows)
        self._model.rows += batch
        candidates = [
            Candidate(
                key=record.key,
                module=record.module,
                features=np.array([float(row)]),
                latency_s=record.latency_s,
                error=record.error,
                measurable=record.module not in self._known or record.measured is not None,
            )
            for row, record in enumerate(batch, start=first)
        ]
        missing = 0

        def measure(order: Order) -> EnergyMeasurement | str:
            nonlocal missing
            record = batch[order.index]
            missing += record.measured is None and record.error is None
            return record.measured or record.error or "its energy is not in the log"

        workload = batch[0].workload
        record = self.session.run_round(workload, candidates, measure)
        return Step(run=run, task=names[workload], record=record, missing=missing)


def _differences(now: RoundRecord, recorded: RoundRecord, policy: _AsRecorded) -> Iterator[str]:
    """What the replay of a round derives otherwise than the log says."""
    for name in (
        "candidates",
        "gated",
        "measured",
        "policy_state",
        "snr_db",
        "best_latency_s",
        "best_cost",
    ):
        one, other = getattr(now, name), getattr(recorded, name)
        if not _same(one, other):
            yield f"{name}: {one}, recorded {other}"
    if recorded.chosen is not None and policy.own != recorded.chosen:
        yield f"chosen: {' '.join(policy.own)}, recorded {' '.join(recorded.chosen)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_SAME)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _outcome(
    name: str,
    workload: str,
    best: Choice | None,
    reference: Choice | None,
    objective: Objective,
) -> Outcome:
    regret = None
    if best and reference:
        pair = [best.best, reference.best]
        cost, least = costs(pair, objective, reference.fastest.latency_s)
        regret = cost / least - 1 if math.isfinite(cost) and least > 0 else None
    return Outcome(name=name, workload=workload, best=best, reference=reference, regret=regret)


def _result(
    steps: Sequence[Step],
    records: Sequence[Record],
    policy: str,
    objective: str,
    *,
    tasks: tuple[Outcome, ...] = (),
    checked: int = 0,
    recorded: bool = False,
) -> PolicyReplay:
    rounds = [step.record for step in steps]
    return PolicyReplay(
        policy=policy,
        objective=objective,
        recorded=recorded,
        simulated=any(
            bool(record.device.get("simulated")) for record in records if isinstance(record, Header)
        ),
        choices_checked=checked,
        steps=tuple(steps),
        tasks=tasks,
        candidates=sum(record.candidates for record in rounds),
        gated=sum(record.gated for record in rounds),
        measured=sum(record.measured for record in rounds),
        missing=sum(step.missing for step in steps),
        device_s=math.fsum(record.seconds["measure_device"] for record in rounds),
        device_s_recorded=math.fsum(
            record.measured.device_s
            for record in records
            if isinstance(record, CandidateRecord) and record.measured
        ),
    )


def to_json(replay: PolicyReplay, *, steps: bool = True) -> dict[str, Any]:
    """As JSON values; units are in the names."""
    values: dict[str, Any] = {
        name: getattr(replay, name)
        for name in (
            *("policy", "objective", "recorded", "simulated", "choices_checked", "differences"),
            *("candidates", "gated", "measured", "missing", "device_s", "device_s_recorded"),
        )
    }
    values["tasks"] = [
        {
            "name": task.name,
            "workload": task.workload,
            "best": _kernel(task.best),
            "reference": _kernel(task.reference),
            "regret": task.regret,
        }
        for task in replay.tasks
    ]
    if steps:
        values["steps"] = [
            {
                "run": step.run,
                "task": step.task,
                "missing": step.missing,
                "differences": list(step.differences),
                **{
                    name: value
                    for name, value in record_json(step.record).items()
                    if name != "kind"
                },
            }
            for step in replay.steps
        ]
    return values


def _kernel(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    kernel = choice.best
    return {"key": kernel.key, "latency_s": kernel.latency_s, "energy_j": kernel.energy_j}
