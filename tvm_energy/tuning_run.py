"""The start of a tuning run, the same for every tuner: objective, log, session, and what is on record.

Nothing here knows TVM; the adapters join these parts to a tuner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import signal
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tvm_energy import records as rec
from tvm_energy.clock_choice import mode_of
from tvm_energy.energy_model.prior import Prior, check_prior
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import (
    ConfigurationError,
    MeterUnavailable,
    RecordFormatError,
    TvmEnergyError,
)
from tvm_energy.features import VECTOR_LENGTH
from tvm_energy.logs.load import comparable, differences, locked
from tvm_energy.measurement import FINALIST_PLAN, MeasurementPlan
from tvm_energy.objective import Objective, parse_objective
from tvm_energy.policy import parse_policy
from tvm_energy.progress import Progress
from tvm_energy.session import WARM_UP, Session
from tvm_energy.work_dir import load

DEFAULT_FINALISTS = 4

#: The energy model as it was at the end of the run; `open_run` takes it, by ``model``, for a later one.
MODEL_FILE = "energy_model.json"


class Interrupted(TvmEnergyError):
    """The user pressed Ctrl-C; everything so far is on disk."""


class NamedDevice(Protocol):
    """What the log and the objective want to know of a device.

    Attributes:
        spec: as in ``--device``, in full: ``sim:a100``, ``cpu``, ``cuda:GPU-...``.
        identity: name, uuid, ..., as in log headers.
        meter: `MeterInfo` as JSON, or None when energy cannot be measured.
        no_meter_reason: why not.
        max_power_w: power limit, where known.
    """

    spec: str
    identity: dict[str, Any]
    meter: dict[str, Any] | None
    no_meter_reason: str
    max_power_w: float | None


class StopFlag:
    """Turns the first Ctrl-C into a request to stop after this round, the second into an exit."""

    def __init__(self) -> None:
        self.requested = False

    @contextlib.contextmanager
    def listening(self, progress: Progress) -> Iterator[None]:
        """Watch for Ctrl-C; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: types.FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            progress.message("stopping after this round; press Ctrl-C again to stop at once")

        previous = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


@dataclass(kw_only=True)
class TuningRun:
    """What every run has.

    Attributes:
        session: the state machine.
        model: the session's.
        log: where its records go; to be closed at the end.
        plan: how one kernel is measured.
        objective: ranks kernels.
        seed: of the run.
        tried: candidates of earlier runs in the directory.
        finals_objective: the objective of the last run, which chose its finalists.
        stop: asked before each round.
    """

    session: Session
    model: XgbKernelModel
    log: rec.RecordLog
    plan: MeasurementPlan
    objective: Objective
    seed: int
    tried: list[rec.CandidateRecord]
    finals_objective: str | None
    stop: StopFlag = field(default_factory=StopFlag)

    def save_model(self) -> None:
        """Write the energy model beside the records, for later runs; nothing while nothing has run."""
        if self.model.knows_anything:
            self.model.save(self.log.path.parent / MODEL_FILE)

    def wants_finals(self, workload: str) -> bool:
        """False when the finalists on record are still the right ones."""
        same_objective = self.finals_objective in (None, self.objective.spec)
        return not (same_objective and self.session.finals_done(workload))


def open_run(
    device: NamedDevice,
    work_dir: Path,
    *,
    objective: str,
    policy: str,
    seed: int | None,
    plan: MeasurementPlan | None,
    progress: Progress,
    versions: Mapping[str, str],
    clocks: int | None = None,
    clock_per_kernel: bool = False,
    model: str | Path | None = None,
    prior: Prior = "none",
    tuner: str,
    warm_up: int = WARM_UP,
) -> TuningRun:
    """Write the header of a run, and take over what earlier runs left in the work directory.

    Args:
        device: what is tuned for.
        work_dir: its lock is held.
        objective: see `tvm_energy.objective`.
        policy: see `tvm_energy.policy`.
        seed: None draws one.
        plan: None for the default one.
        progress: is told what is set aside.
        versions: for the header.
        clocks: locked clocks at which each finalist is measured at most; None leaves the clock alone.
        clock_per_kernel: a clock for each kernel instead of one for all.
        model: energy model, or work directory, of an earlier run on the same device, to begin with what it
            learned.
        prior: see `XgbKernelModel`.
        tuner: who reads the features, since another tuner's do not mean the same.
        warm_up: see `Session`.

    Raises:
        ConfigurationError: objective, policy, model or prior is wrong.
        MeterUnavailable: the objective needs energy, and the device has no meter.
        WorkDirError, RecordFormatError: the work directory cannot be used.
    """
    parsed = parse_objective(objective, max_power_w=device.max_power_w)
    if parsed.needs_energy and device.meter is None:
        raise MeterUnavailable(
            f"objective {parsed.spec!r} needs energy, which cannot be measured on {device.spec}: "
            f"{device.no_meter_reason}; or tune for a simulated device such as sim:a100"
        )
    plan = plan or MeasurementPlan()
    chosen_policy = parse_policy(policy if parsed.needs_energy else "none")
    if seed is None:
        seed = int(np.random.default_rng().integers(1, 2**30))
    header = rec.Header(
        device=device.identity,
        meter=device.meter,
        objective=parsed.spec,
        policy=chosen_policy.spec,
        plan=plan.to_json(),
        versions=dict(versions),
        seed=seed,
        created=rec.now(),
        clocks=None if clocks is None else {"finalists": clocks, "per_kernel": clock_per_kernel},
    )
    check_prior(prior)
    origin = {"tuner": tuner, "header": rec.to_json(header)}
    energy_model = XgbKernelModel(seed=seed, prior=prior, origin=origin)
    start = None if model is None else _start(energy_model, Path(model), work_dir, progress)
    header = dataclasses.replace(header, model={"prior": prior, "start": start})
    earlier = _earlier(work_dir, header, progress)
    log = rec.RecordLog(work_dir)
    log.append(header)
    log.flush()
    session = Session(
        objective=parsed,
        policy=chosen_policy,
        model=energy_model,
        log=log,
        rng=np.random.default_rng(seed),
        clocks=mode_of(header),
        warm_up=warm_up,
    )
    session.restore(earlier)
    return TuningRun(
        session=session,
        model=energy_model,
        log=log,
        plan=plan,
        objective=parsed,
        seed=seed,
        tried=[record for record in earlier if isinstance(record, rec.CandidateRecord)],
        finals_objective=_last_objective(earlier),
    )


def _start(
    model: XgbKernelModel, given: Path, work_dir: Path, progress: Progress
) -> dict[str, Any]:
    """Let a model begin with what an earlier run learned; returns what the header says of it.

    Raises:
        ConfigurationError: there is no such model, the file is none, it is the run's own, or it is of another
            device, tuner or locked clock.
    """
    path = given / MODEL_FILE if given.is_dir() else given
    if not path.is_file():
        hint = (
            f"the folder has no {MODEL_FILE}, which a run writes when it ends"
            if given.is_dir()
            else "there is no such file"
        )
        raise ConfigurationError(
            f"--model {given}: {hint}; give the work directory of a finished run, or its {MODEL_FILE}"
        )
    if path.resolve().parent == work_dir.resolve():
        raise ConfigurationError(
            f"--model {given} is of the work directory itself, whose records the run continues from "
            "anyway; leave --model out, or choose another --work-dir"
        )
    other = XgbKernelModel()
    try:
        other.load(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        theirs = rec.from_json(other.origin.get("header"))
    except OSError as exc:
        raise ConfigurationError(f"--model {given}: cannot read {path}: {exc.strerror}") from exc
    except RecordFormatError as exc:
        raise ConfigurationError(f"--model {given}: {exc}") from exc
    ours = rec.from_json(model.origin["header"])
    if not isinstance(theirs, rec.Header) or not isinstance(ours, rec.Header):
        raise ConfigurationError(f"--model {given}: the file does not say which run it is of")
    _check_same_device(given, theirs, ours)
    if other.earlier_features not in (None, VECTOR_LENGTH):
        raise ConfigurationError(
            f"--model {given} knows kernels by {other.earlier_features} features instead of {VECTOR_LENGTH}: "
            "another version wrote it; tune again to have one of this version"
        )
    if other.origin.get("tuner") != model.origin["tuner"]:
        raise ConfigurationError(
            f"--model {given} is of the tuner {str(other.origin.get('tuner'))[:40]!r}, whose features "
            f"differ from those of {model.origin['tuner']!r}"
        )
    reasons = differences(theirs, ours)
    model.adopt(other, energies=not reasons)
    if reasons:
        progress.message(
            f"the energies of {given} were measured in another way ({'; '.join(reasons)}): only its "
            "latencies are used"
        )
    progress.message(f"starting from {model.earlier()} kernels of {path}")
    return {
        "file": str(path),
        "sha256": digest,
        "samples": model.earlier(),
        "energies": not reasons,
    }


def _check_same_device(given: Path, theirs: rec.Header, ours: rec.Header) -> None:
    if theirs.device.get("uuid") != ours.device.get("uuid"):
        raise ConfigurationError(
            f"--model {given} is of device {str(theirs.device.get('name'))[:80]!r} "
            f"({str(theirs.device.get('uuid'))[:80]}), not of {ours.device.get('uuid')}; energy and "
            "latency of one device say little about another's"
        )
    if locked(theirs) != locked(ours):
        raise ConfigurationError(
            f"--model {given} was learned while the clock was locked otherwise "
            f"({locked(theirs) or 'not locked'}, here {locked(ours) or 'not locked'})"
        )


def finalist_plan(plan: MeasurementPlan) -> MeasurementPlan:
    """The finalists' plan, with longer windows where the user asked for longer ones."""
    window_s = max(FINALIST_PLAN.window_s, plan.window_s)
    return dataclasses.replace(
        FINALIST_PLAN,
        window_s=window_s,
        budget_s=FINALIST_PLAN.budget_s * window_s / FINALIST_PLAN.window_s,
        net_of_idle=plan.net_of_idle,
        seed=plan.seed,
    )


def check_counts(tasks: Sequence[Any], trials: int, per_round: int, finalists: int) -> None:
    """Refuse numbers that make no sense.

    Raises:
        ConfigurationError: naming the number.
    """
    if not tasks:
        raise ConfigurationError("there is nothing to tune: no tasks were given")
    for name, value, least in (
        ("trials", trials, 1),
        ("trials per round", per_round, 1),
        ("finalists", finalists, 0),
    ):
        if value < least:
            raise ConfigurationError(f"{name} must be at least {least}, got {value}")


def resumed_message(resumed: int, trials: int) -> str:
    """What a run that is continued says first."""
    return (
        f"continuing: {resumed} candidates are on record and are not tried again; "
        f"{max(0, trials - resumed)} trials are left"
    )


def _earlier(work_dir: Path, header: rec.Header, progress: Progress) -> list[rec.Record]:
    """What earlier runs left; what was measured in another way is set aside, and that is said."""
    kept, set_aside = comparable(load(work_dir, str(header.device["uuid"])), header)
    if set_aside:
        progress.message(
            f"{set_aside} energies on record were measured in another way "
            "(--window-s or another setting differs) and are not used"
        )
    return kept


def _last_objective(records: Sequence[rec.Record]) -> str | None:
    specs = [record.objective for record in records if isinstance(record, rec.Header)]
    return specs[-1] if specs else None
