"""Which clocks are measured, on a made-up device whose best pair is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from log_examples import header, measurement

from tvm_energy.clock_choice import ONE, PER_KERNEL, TaskKernels, choose_all
from tvm_energy.clock_search import FEWEST_CLOCKS, ClockSearch, check_clocks
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import ConfigurationError
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.objective import parse_objective
from tvm_energy.policy import parse_policy
from tvm_energy.records import ClockRecord, RecordLog, read_records
from tvm_energy.session import Candidate, Session

CLOCKS = np.arange(300.0, 1501.0, 15.0)
#: Kernel -> (clocks of the core a launch, seconds that no clock shortens, watts at 1 GHz and 1 V).
COMPUTE = {"c1": (1.0e6, 0.1e-3, 150.0), "c2": (1.1e6, 0.05e-3, 120.0)}
MEMORY = {"m1": (0.2e6, 1.0e-3, 80.0), "m2": (0.25e6, 0.95e-3, 90.0)}


class Device:
    """Noise of 0.03 %, repeatable; the driver takes the highest clock."""

    def __init__(self, tasks: dict[str, dict[str, tuple[float, float, float]]], noise=3e-4) -> None:
        self.tasks = tasks
        self.noise = noise
        self.clock: float | None = None
        self.asked: list[tuple[float, str, str, bool]] = []
        self.broken: set[tuple[str, float]] = set()
        self.rng = np.random.default_rng(3)

    @contextlib.contextmanager
    def locked(self, clock: float) -> Iterator[None]:
        assert self.clock is None
        self.clock = clock
        try:
            yield
        finally:
            self.clock = None

    def truth(self, workload: str, key: str, clock: float | None) -> tuple[float, float]:
        f = CLOCKS[-1] if clock is None else clock
        cycles, fixed, watts = self.tasks[workload][key]
        volts = 1 + 0.8e-3 * max(0.0, f - 1000)
        latency = cycles / (1e6 * f) + fixed
        return latency, latency * (40 + watts * f / 1000 * volts**2)

    def result(self, workload: str, key: str, clock: float | None) -> EnergyMeasurement:
        t, e = self.truth(workload, key, clock)
        t, e = (v * (1 + self.noise * self.rng.standard_normal()) for v in (t, e))
        observed = CLOCKS[-1] if clock is None else clock
        return measurement(
            e, t, relative_stderr=max(self.noise, 1e-6), clock_mhz=observed, throttle_reasons=()
        )

    def measure(
        self, workload: str, keys: Sequence[str], long: bool
    ) -> dict[str, EnergyMeasurement | str]:
        assert self.clock is not None, "measured without a lock"
        self.asked += [(self.clock, workload, key, long) for key in keys]
        return {
            key: "it broke"
            if (key, self.clock) in self.broken
            else self.result(workload, key, self.clock)
            for key in keys
        }

    def best(self, objective: str, mode: str) -> dict[str, tuple[str, float | None]]:
        """The best pairs by the truth, at all clocks there are."""
        tasks = {
            w: TaskKernels(
                kernels=session_kernels(self, w),
                points={
                    (key, f): ClockRecord(
                        workload=w, key=key, clock_mhz=f, measured=_exact(*self.truth(w, key, f))
                    )
                    for key in kernels
                    for f in map(float, CLOCKS)
                },
            )
            for w, kernels in self.tasks.items()
        }
        choices = choose_all(tasks, parse_objective(objective), mode)
        return {w: (c.best.key, c.best.clock_mhz) for w, c in choices.items()}


def _exact(t: float, e: float) -> EnergyMeasurement:
    return measurement(e, t, relative_stderr=1e-9)


def session_kernels(device: Device, workload: str) -> dict:
    from tvm_energy.ranking import Kernel

    return {
        key: Kernel(
            key=key,
            latency_s=device.truth(workload, key, None)[0],
            measured=_exact(*device.truth(workload, key, None)),
            final=True,
        )
        for key in device.tasks[workload]
    }


def new_session(objective: str, mode: str, log: RecordLog | None = None) -> Session:
    return Session(
        objective=parse_objective(objective),
        policy=parse_policy("none"),
        model=XgbKernelModel(seed=1),
        log=log,
        clocks=mode,
    )


def finished(
    device: Device, objective: str, mode: str = ONE, log: RecordLog | None = None
) -> Session:
    session = new_session(objective, mode, log)
    if log is not None:
        log.append(header(clocks={"finalists": 5, "per_kernel": mode == PER_KERNEL}))
    for workload, kernels in device.tasks.items():
        session.add_task(workload, workload)
        session.run_round(
            workload,
            [
                Candidate(
                    key=key, features=np.zeros(4), latency_s=device.truth(workload, key, None)[0]
                )
                for key in kernels
            ],
            lambda order: "not measured",
        )
        session.record_finals(
            workload, {key: device.result(workload, key, None) for key in kernels}
        )
    return session


def search(device: Device, session: Session, most: int = 5, **more) -> None:
    ClockSearch(session, CLOCKS, most, locked=device.locked, measure=device.measure, **more).run()


def clocks_of(device: Device, workload: str) -> set[float]:
    return {clock for clock, w, _, long in device.asked if w == workload and not long}


def cost(device: Device, session: Session) -> tuple[float, float]:
    """True latency and energy of what was chosen."""
    pairs = [device.truth(w, c.best.key, c.best.clock_mhz) for w, c in session.choices().items()]
    return sum(t for t, _ in pairs), sum(e for _, e in pairs)


def true_best(device: Device, objective: str, mode: str) -> float:
    return sum(
        device.truth(w, key, mhz)[1] for w, (key, mhz) in device.best(objective, mode).items()
    )


@pytest.mark.parametrize("objective", ["energy:slack=0.05", "energy:slack=0.25", "energy"])
@pytest.mark.parametrize("mode", [ONE, PER_KERNEL])
@pytest.mark.parametrize("tasks", [{"w": COMPUTE}, {"w": MEMORY}, {"c": COMPUTE, "m": MEMORY}])
def test_the_choice_is_close_to_the_best_of_all_pairs(
    objective: str, mode: str, tasks: dict
) -> None:
    device = Device(tasks)
    session = finished(device, objective, mode)
    search(device, session)
    _, energy = cost(device, session)
    assert energy <= 1.02 * true_best(device, objective, mode)
    for workload in tasks:
        assert FEWEST_CLOCKS <= len(clocks_of(device, workload)) <= 5
    for workload, choice in session.choices().items():
        clock = choice.best.clock_mhz
        if clock is not None:  # only a confirmed measurement wins
            assert session.points(workload)[choice.best.key, clock].confirmed
    if mode == ONE:
        assert len({c.best.clock_mhz for c in session.choices().values()}) == 1
    if "slack" in objective:
        limit = 1 + session.objective.slack
        fastest = sum(c.fastest.latency_s for c in session.choices().values())
        chosen = sum(c.best.latency_s for c in session.choices().values())
        assert chosen <= limit * fastest


def test_kernel_then_clock_would_miss_the_joint_choice() -> None:
    """The kernel that is best at the default clock is not the best one at the best clock."""
    device = Device(
        {"w": {"a": (1.0e6, 0.30e-3, 100.0), "b": (1.06e6, 0.24e-3, 104.0)}}, noise=1e-5
    )
    session = finished(device, "energy:slack=0.4")
    search(device, session)
    choice = session.choices()["w"]
    assert choice.at_default is not None
    key_then_clock = min(
        device.truth("w", choice.at_default.key, f)[1]
        for f in CLOCKS
        if device.truth("w", choice.at_default.key, f)[0] <= 1.4 * choice.fastest.latency_s
    )
    assert cost(device, session)[1] <= 1.001 * key_then_clock


def test_every_finalist_is_measured_at_every_clock_once() -> None:
    device = Device({"c": COMPUTE, "m": MEMORY})
    session = finished(device, "energy:slack=0.1")
    search(device, session, most=4)
    short = [ask[:3] for ask in device.asked if not ask[3]]
    assert len(short) == len(set(short)) == 4 * len(clocks_of(device, "c"))
    assert clocks_of(device, "c") == clocks_of(device, "m")


def test_a_resumed_search_measures_nothing_twice(tmp_path: Path) -> None:
    device = Device({"c": COMPUTE, "m": MEMORY})
    with RecordLog(tmp_path) as log:
        session = finished(device, "energy:slack=0.1", log=log)
        search(device, session)
    chosen = {w: c.best for w, c in session.choices().items()}
    records = list(read_records(log.path))
    # All of it: nothing is left to do.
    again, asked = new_session("energy:slack=0.1", ONE), len(device.asked)
    again.restore(records)
    for workload in device.tasks:
        again.add_task(workload, workload)
    search(device, again)
    assert len(device.asked) == asked
    assert {w: c.best for w, c in again.choices().items()} == chosen
    # Interrupted within the second clock: that clock is completed, and none is repeated.
    points = [index for index, record in enumerate(records) if isinstance(record, ClockRecord)]
    cut = new_session("energy:slack=0.1", ONE)
    cut.restore(records[: points[5]])
    for workload in device.tasks:
        cut.add_task(workload, workload)
    device.asked.clear()
    search(device, cut)
    known = {
        (r.clock_mhz, r.workload, r.key) for r in records[: points[5]] if isinstance(r, ClockRecord)
    }
    assert not known & {ask[:3] for ask in device.asked if not ask[3]}
    assert len(clocks_of(device, "m") | {clock for clock, *_ in known}) <= 5


def test_a_pair_that_cannot_be_measured_is_left_out_and_said() -> None:
    device = Device({"w": COMPUTE})
    device.broken = {(key, f) for key in COMPUTE for f in CLOCKS if f < 1300}
    session = finished(device, "energy:slack=0.25")
    said: list[str] = []
    search(device, session, message=said.append)
    assert any("could not be measured" in text and "it broke" in text for text in said)
    clock = session.choices()["w"].best.clock_mhz
    assert clock is None or clock >= 1300


def test_a_confirmation_that_disagrees_gives_way_to_the_next_best() -> None:
    device = Device({"w": COMPUTE}, noise=1e-5)
    session = finished(device, "energy:slack=0.25")
    first: list[tuple[str, float]] = []
    real = device.measure

    def measure(workload: str, keys: Sequence[str], long: bool) -> dict:
        results = real(workload, keys, long)
        if long and not first:
            (key,) = keys
            assert device.clock is not None
            first.append((key, device.clock))
            wrong = results[key]
            results[key] = measurement(3 * wrong.energy_j, wrong.latency_s)
        return results

    ClockSearch(session, CLOCKS, 5, locked=device.locked, measure=measure).run()
    best = session.choices()["w"].best
    assert first
    assert (best.key, best.clock_mhz) != first[0]
    assert best.clock_mhz is None or session.points("w")[best.key, best.clock_mhz].confirmed


def test_clocks_above_what_the_driver_takes_are_not_tried() -> None:
    class Capped(Device):
        def result(self, workload: str, key: str, clock: float | None) -> EnergyMeasurement:
            return super().result(workload, key, min(clock or 1200.0, 1200.0))

    device = Capped({"w": COMPUTE})
    session = finished(device, "energy:slack=0.02")
    search(device, session)
    assert max(clocks_of(device, "w")) <= 1200.0


def test_without_finalists_nothing_is_locked() -> None:
    device = Device({"w": COMPUTE})
    session = new_session("energy", ONE)
    session.add_task("w", "w")
    search(device, session)
    assert device.asked == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((2, 4, True), "at least 3, got 2"),
        ((5, 0, True), "--finalists"),
        ((5, 4, False), "latency"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: tuple, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_clocks(*arguments)
