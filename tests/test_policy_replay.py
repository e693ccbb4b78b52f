from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from log_examples import header, measurement

from tvm_energy.energy_model.base import Floats, Prediction, Sample
from tvm_energy.errors import ConfigurationError
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.objective import parse_objective
from tvm_energy.policy import parse_policy
from tvm_energy.policy_replay import replay_policy, to_json
from tvm_energy.records import (
    FILE_NAME,
    CandidateRecord,
    Header,
    Record,
    RecordLog,
    RoundRecord,
    read_records,
)
from tvm_energy.session import Candidate, Order, Session

SPEC = "energy:slack=0.25"


class NoisyModel:
    """Knows the true energy up to an error; the first feature is latency, the second power."""

    def __init__(self, error: float) -> None:
        self._error = error
        self._fitted = False

    def fit(self, samples: Sequence[Sample]) -> None:
        self._fitted = True

    def predict(
        self, features: Floats, group: str, latency_s: Floats | None = None
    ) -> Prediction | None:
        if not self._fitted:
            return None
        energy_j = (
            features[:, 0] * features[:, 1] * (1 + self._error * np.sin(1e7 * features[:, 0]))
        )
        return Prediction(
            latency_s=features[:, 0], energy_j=energy_j, energy_stderr_j=0.1 * energy_j
        )

    def save(self, path: str | Path) -> None:
        raise AssertionError

    def load(self, path: str | Path) -> None:
        raise AssertionError


def run(folder: Path, policy: str, *, seed: int = 5, rounds: int = 6, runs: int = 1) -> Path:
    """A made-up search, played through the session as a real one, with two tasks and some failures."""
    rng = np.random.default_rng(11)
    folder.mkdir(exist_ok=True)
    for number in range(runs):
        path = folder / FILE_NAME
        earlier = list(read_records(path)) if path.exists() else []
        with RecordLog(folder) as log:
            spec = parse_policy(policy).spec
            log.append(
                dataclasses.replace(
                    header(objective=SPEC), policy=spec, seed=seed + number, created=1e9 + number
                )
            )
            session = Session(
                objective=parse_objective(SPEC),
                policy=parse_policy(policy),
                model=NoisyModel(0.05),
                log=log,
                rng=np.random.default_rng(seed + number),
            )
            session.restore(earlier)
            for index in range(rounds):
                for workload in ("w0", "w1"):
                    session.add_task(workload, f"task {workload}")
                    play(session, workload, f"{number}-{index}", rng)
            finalists = session.finalists("w0", 2)
            session.record_finals("w0", {key: measurement(0.1, 1e-3) for key in finalists})
    return folder


def play(session: Session, workload: str, name: str, rng: np.random.Generator) -> None:
    features = np.stack([rng.uniform(1e-3, 1.4e-3, 16), rng.uniform(100, 200, 16)], axis=1)
    batch = [
        Candidate(
            key=f"{name}-{i}",
            module=f"m{name}-{i}",
            features=row,
            latency_s=None if i == 3 else float(row[0]),
            error="build: no" if i == 3 else None,
        )
        for i, row in enumerate(features)
    ]

    def measure(order: Order) -> EnergyMeasurement | str:
        latency_s, power_w = map(float, features[order.index])
        crashed = order.index == 7
        return "energy: crashed" if crashed else measurement(latency_s * power_w, latency_s)

    session.run_round(workload, batch, measure)


@pytest.mark.parametrize("policy", ["snr", "gain", "all", "fixed:0.3", "none"])
def test_a_replay_decides_as_the_run_did(tmp_path: Path, policy: str) -> None:
    replay = replay_policy(run(tmp_path, policy))
    assert replay.recorded
    assert [step.differences for step in replay.steps] == [()] * 12
    assert replay.choices_checked == 12
    recorded = [r for r in read_records(tmp_path / FILE_NAME) if isinstance(r, RoundRecord)]
    for step, record in zip(replay.steps, recorded, strict=True):
        assert step.task == f"task {record.workload}"
        assert dataclasses.replace(step.record, seconds={}) == dataclasses.replace(
            record, seconds={}
        )


def test_a_continued_run_is_replayed_from_where_it_went_on(tmp_path: Path) -> None:
    replay = replay_policy(run(tmp_path, "snr", rounds=3, runs=3))
    assert [step.run for step in replay.steps] == [1] * 6 + [2] * 6 + [3] * 6
    assert [step.record.round for step in replay.steps if step.task == "task w0"] == list(range(9))
    assert replay.differences == 0


def tampered(folder: Path, change: str) -> list[Record]:
    """A log in which one figure is not what the raw values give."""
    records = list(read_records(folder / FILE_NAME))
    index = [i for i, r in enumerate(records) if isinstance(r, RoundRecord)][6]
    record = records[index]
    assert isinstance(record, RoundRecord)
    value = getattr(record, change)
    if change == "chosen":
        changed: object = (*value[:-1], "0-3-9") if value[-1] != "0-3-9" else (*value[:-1], "0-3-8")
    elif change == "policy_state":
        changed = {**value, "fraction": 0.01}
    else:
        changed = value * 2
    records[index] = dataclasses.replace(record, **{change: changed})
    return records


@pytest.mark.parametrize(
    "change", ["gated", "snr_db", "best_latency_s", "best_cost", "policy_state", "chosen"]
)
def test_a_figure_that_raw_values_do_not_give_is_found(tmp_path: Path, change: str) -> None:
    replay = replay_policy(tampered(run(tmp_path, "snr"), change))
    found = [difference for step in replay.steps for difference in step.differences]
    assert any(difference.startswith(f"{change}: ") for difference in found)
    assert all(not step.differences for step in replay.steps[:6])


def test_without_recorded_choices_those_measured_are_taken(tmp_path: Path) -> None:
    run(tmp_path, "snr")
    records = [
        dataclasses.replace(record, chosen=None) if isinstance(record, RoundRecord) else record
        for record in read_records(tmp_path / FILE_NAME)
    ]
    replay = replay_policy(records)
    assert (replay.choices_checked, replay.differences) == (0, 0)


def test_another_policy_is_studied_on_a_log_with_every_answer(tmp_path: Path) -> None:
    run(tmp_path, "all")
    every = replay_policy(tmp_path, "all")
    none = replay_policy(tmp_path, "none")
    some = replay_policy(tmp_path, "fixed:0.3")
    adaptive = replay_policy(tmp_path, "snr")
    assert not every.recorded
    assert every.missing == some.missing == adaptive.missing == 0
    assert every.device_s == pytest.approx(every.device_s_recorded)
    assert none.measured == 0 < some.measured < every.measured
    assert adaptive.measured < every.measured
    assert [task.regret for task in every.tasks] == [0.0, 0.0]
    assert [task.best for task in none.tasks] == [None, None]
    for task in some.tasks:
        assert task.reference is not None
        assert task.regret is not None
        assert task.regret >= 0
    # The same decisions again, and others with another seed.
    assert replay_policy(tmp_path, "snr").steps[5].record.chosen == adaptive.steps[5].record.chosen
    other = replay_policy(tmp_path, "snr", seed=99)
    assert [s.record.chosen for s in other.steps] != [s.record.chosen for s in adaptive.steps]


def test_answers_that_the_log_does_not_have_are_counted(tmp_path: Path) -> None:
    run(tmp_path, "fixed:0.3")
    replay = replay_policy(tmp_path, "all")
    recorded = sum(
        record.measured is not None
        for record in read_records(tmp_path / FILE_NAME)
        if isinstance(record, CandidateRecord)
    )
    assert replay.missing > 0
    assert replay.measured == recorded


def test_another_objective_is_a_study(tmp_path: Path) -> None:
    replay = replay_policy(run(tmp_path, "snr"), objective="edp")
    assert (replay.recorded, replay.objective) == (False, "edp")


def test_nothing_is_written(tmp_path: Path) -> None:
    path = run(tmp_path, "snr") / FILE_NAME
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    before = path.stat().st_mtime_ns, path.read_bytes()
    replay_policy(tmp_path)
    replay_policy(tmp_path, "snr")
    tmp_path.chmod(0o700)
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_round_is_left_out(tmp_path: Path) -> None:
    records = list(read_records(run(tmp_path, "snr") / FILE_NAME))
    last = max(i for i, record in enumerate(records) if isinstance(record, RoundRecord))
    replay = replay_policy(records[:last])
    assert (len(replay.steps), replay.differences) == (11, 0)
    assert len(replay_policy(records[:last], "all").steps) == 12


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "none", rounds=1)
    with pytest.raises(ConfigurationError, match="unknown policy 'guess'"):
        replay_policy(tmp_path, "guess")


def test_the_json_has_every_round(tmp_path: Path) -> None:
    values = to_json(replay_policy(run(tmp_path, "snr", rounds=2)))
    assert len(values["steps"]) == 4
    assert values["steps"][0]["workload"] == "w0"
    assert values["simulated"] is True
    assert isinstance(next(read_records(tmp_path / FILE_NAME)), Header)
