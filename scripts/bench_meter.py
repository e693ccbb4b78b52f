"""Error, error bars and cost of energy measuring protocols: simulated sensors and recorded traces.

Everything runs on a virtual clock in this process; no GPU is used and no real time passes.

1. *Simulated sensors* of the classes that arXiv:2312.02741 tells apart. Each run draws a kernel (5 us to
   50 ms a launch, 90 to 380 W), a power that settles after the start of the load, a sensor phase and
   the noise of an update (0.2 to 2 W, our estimate: nobody published it). The gain error of the
   sensor is left out: no software can see it. Truth: settled power x time of a launch. ``noise`` is the
   A100's sensor again, with the noise that is named there and the budget of the default plan.
2. *Recorded traces* (`scripts/data/power_traces`): an external meter at 4.8 kHz and nvidia-smi on the same
   run of an A100 and an RTX 3090; counter readings before and after real kernels at 101 clocks.

Protocols:

``tvm_energy``         `tvm_energy.protocol.measure` with its default plan, a budget of 2 s, and the
                       counter
``tvm_energy_power``   the same without a counter: integrated instant power
``tvm_energy_race``    the same as ``tvm_energy`` as a race without a rival: content with a standard error of
                       2 %, and with one window once ten degrees of freedom of earlier kernels (here:
                       earlier runs on the same class of sensor) say how windows scatter
``kernel_tuner``       1 s continuously, median instant power x mean time of 7 separately timed runs
                       (kernel_tuner/observers/nvml.py and core.py: readings begin when all launches are
                       queued, of which a GPU holds about 1024)
``before_after``       the counter read once before and once after 1 s of launches
``polled_draw``        mean of nvmlDeviceGetPowerUsage every 20 ms during 1 s of launches

The last line of stdout is one JSON object. ``sensors[class][protocol]`` and ``traces[trace][protocol]`` hold
``median_error``, ``p95_error`` (relative, absolute values), ``coverage`` (share of 95 % intervals that hold
the truth; null where a protocol gives none), ``seconds`` (mean device time a candidate) and ``runs``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import power_traces
from arguments import positive

from tvm_energy.errors import TvmEnergyError
from tvm_energy.measurement import NO_SCATTER, MeasurementPlan
from tvm_energy.meters.base import TimedLoad
from tvm_energy.meters.nvml import NvmlMeter, open_nvml_meter
from tvm_energy.protocol import measure
from tvm_energy.simulation.nvml import (
    A100_SENSOR,
    ADA_SENSOR,
    HOPPER_SENSOR,
    VOLTA_SENSOR,
    SensorSpec,
    SimulatedNvml,
    SimulatedState,
)
from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock

SENSORS = {
    "a100": A100_SENSOR,
    "hopper": HOPPER_SENSOR,
    "ada": ADA_SENSOR,
    "volta": VOLTA_SENSOR,
}
BUDGET_S = 2.0  # what a candidate may cost
RUN_S = 1.0  # what the usual protocols run
QUEUE = 1024  # launches that a GPU's queue holds
KERNEL_TUNER_TIMED_RUNS = 7
POLL_S = 1e-3
DRAW_POLL_S = 0.02

#: Standard deviation of an update's noise on the noisy sensors.
NOISE_W = (5.0, 10.0, 20.0)

#: Goals for ``tvm_energy``.
GOALS = {"median_error": 0.01, "p95_error": 0.03, "seconds": BUDGET_S, "coverage": (0.90, 0.99)}


@dataclass(frozen=True)
class Outcome:
    """What one protocol said about one kernel; seconds are device time."""

    energy_j: float
    interval_j: tuple[float, float] | None
    seconds: float


class Card(Protocol):
    """What a protocol works on: a sensor, and one kernel on the same clock."""

    clock: VirtualClock
    nvml: SimulatedNvml
    load: TimedLoad
    latency_s: float
    has_counter: bool
    budget_s: float

    def timed_run_s(self) -> float:
        """Time of one launch as events give it."""
        ...


class SimulatedCard:
    """A card that ran another kernel shortly before, and the kernel to be measured."""

    def __init__(
        self,
        sensor: SensorSpec,
        seed: int,
        *,
        noise_w: float | None = None,
        budget_s: float = BUDGET_S,
    ) -> None:
        rng = random.Random(seed)
        self.latency_s = math.exp(rng.uniform(math.log(5e-6), math.log(50e-3)))
        self.power_w = rng.uniform(90, 380)
        drawn_w = math.exp(rng.uniform(math.log(0.2), math.log(2.0)))
        noise_w = drawn_w if noise_w is None else noise_w
        self.clock = VirtualClock()
        self.timeline = PowerTimeline(rng.uniform(40, 70))
        self.nvml = SimulatedNvml(
            self.timeline,
            self.clock,
            dataclasses.replace(sensor, gain=1.0, offset_w=0.0, noise_w=noise_w),
            name="bench card",
            uuid="GPU-simulated",
            power_limit_w=400.0,
            state=lambda: SimulatedState(clock_mhz=1400, temperature_c=50),
            seed=seed,
        )
        self.has_counter = sensor.has_counter
        self.budget_s = budget_s
        self.rng = rng
        self.timeline.append(0.0, 0.5, rng.uniform(90, 380))
        self.clock.advance_to(0.7)
        self.load = SimulatedLoad(self)

    @property
    def truth_j(self) -> float:
        """Joules a launch once power has settled."""
        return self.latency_s * self.power_w

    def timed_run_s(self) -> float:
        """Launches that are timed one by one scatter by 1 %."""
        return self.latency_s * self.rng.gauss(1.0, 0.01)


class SimulatedLoad:
    """Launches of constant length; power settles exponentially after an idle time.

    The host needs 20 to 100 us between two chunks; the card knows how long it ran.
    """

    _PIECE_S = 0.02

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self._amplitude = card.rng.uniform(-0.08, 0.08)
        self._tau_s = card.rng.uniform(0.05, 0.25)
        self._busy_since_s = 0.0
        self._queued_s = self._ran_s = 0.0

    def enqueue(self, launches: int) -> None:
        card, timeline = self._card, self._card.timeline
        start_s = max(card.clock.now(), timeline.end_s) + card.rng.uniform(20e-6, 100e-6)
        if start_s - timeline.end_s > 0.01:
            self._busy_since_s = start_s
        duration_s = launches * card.latency_s * card.rng.gauss(1.0, 0.001)
        self._queued_s += duration_s
        pieces = max(1, round(duration_s / self._PIECE_S))
        for piece in range(pieces):
            at_s = start_s + piece * duration_s / pieces
            settled = math.exp(-(at_s - self._busy_since_s) / self._tau_s)
            at_s = max(at_s, timeline.end_s)  # rounding
            power_w = card.power_w * (1 + self._amplitude * settled)
            timeline.append(at_s, duration_s / pieces, power_w)

    def synchronize(self) -> None:
        self._card.clock.advance_to(self._card.timeline.end_s)
        if self._queued_s:
            self._ran_s, self._queued_s = self._queued_s, 0.0

    def device_seconds(self) -> float | None:
        return self._ran_s


# ---- protocols ----------------------------------------------------------------------------------


def tvm_energy(card: Card, meter: NvmlMeter, seed: int) -> Outcome:
    started_s = card.clock.now()
    plan = MeasurementPlan(seed=seed, budget_s=card.budget_s)
    result = measure(card.load, meter, plan)
    return Outcome(result.energy_j, result.interval_j, card.clock.now() - started_s)


class Race:
    """`tvm_energy` as a search races it; knows what the kernels before told."""

    def __init__(self) -> None:
        self._scatter = NO_SCATTER

    def __call__(self, card: Card, meter: NvmlMeter, seed: int) -> Outcome:
        started_s = card.clock.now()
        plan = MeasurementPlan(seed=seed, budget_s=card.budget_s).race(None, self._scatter)
        result = measure(card.load, meter, plan)
        self._scatter += result.scatter
        return Outcome(result.energy_j, result.interval_j, card.clock.now() - started_s)


def kernel_tuner(card: Card, meter: NvmlMeter, seed: int) -> Outcome:
    started_s = card.clock.now()
    times_s = []
    for _ in range(KERNEL_TUNER_TIMED_RUNS):
        card.load.enqueue(1)
        card.load.synchronize()
        times_s.append(card.timed_run_s())
    launches = math.ceil(RUN_S / statistics.fmean(times_s))
    begin_s = card.clock.now()
    card.load.enqueue(launches)
    # The queue is full until about QUEUE launches are left; only then does the host go on.
    end_s = begin_s + launches * card.latency_s
    card.clock.advance_to(end_s - min(launches, QUEUE) * card.latency_s)
    kept: list[tuple[float, float]] = []
    while True:
        now_s, power_w = card.clock.now(), _power_w(card)
        if not kept or power_w != kept[-1][1] or now_s - kept[-1][0] > 0.01:
            kept.append((now_s, power_w))
        if card.clock.now() >= end_s:
            break
        card.clock.sleep(POLL_S)  # it polls faster; the values are the same
    card.load.synchronize()
    energy_j = statistics.median(w for _, w in kept) * statistics.fmean(times_s)
    return Outcome(energy_j, None, card.clock.now() - started_s)


def before_after(card: Card, meter: NvmlMeter, seed: int) -> Outcome:
    started_s = card.clock.now()
    launches = max(1, round(RUN_S / card.latency_s))
    before_j = meter.read().energy_j
    card.load.enqueue(launches)
    card.load.synchronize()
    after_j = meter.read().energy_j
    assert before_j is not None
    assert after_j is not None
    return Outcome((after_j - before_j) / launches, None, card.clock.now() - started_s)


def polled_draw(card: Card, meter: NvmlMeter, seed: int) -> Outcome:
    started_s = card.clock.now()
    launches = max(1, round(RUN_S / card.latency_s))
    end_s = started_s + launches * card.latency_s
    card.load.enqueue(launches)
    powers_w = []
    while card.clock.now() < end_s:
        powers_w.append(card.nvml.nvmlDeviceGetPowerUsage("GPU-simulated") * 1e-3)
        card.clock.sleep(DRAW_POLL_S)
    card.load.synchronize()
    seconds = card.clock.now() - started_s
    return Outcome(statistics.fmean(powers_w) * card.latency_s, None, seconds)


def _power_w(card: Card) -> float:
    """Field 186, or nvmlDeviceGetPowerUsage where a card of that time has no such field."""
    (field,) = card.nvml.nvmlDeviceGetFieldValues("GPU-simulated", [186])
    if field.nvmlReturn == 0:
        return field.value.uiVal * 1e-3
    return card.nvml.nvmlDeviceGetPowerUsage("GPU-simulated") * 1e-3


Measures = Callable[[Any, NvmlMeter, int], Outcome]

#: Name -> what makes a protocol for a series of kernels, and the sensor that it opens (None: the best there
#: is; "power": no counter).
PROTOCOLS: dict[str, tuple[Callable[[], Measures], str | None]] = {
    "tvm_energy": (lambda: tvm_energy, None),
    "tvm_energy_power": (lambda: tvm_energy, "power"),
    "tvm_energy_race": (Race, None),
    "kernel_tuner": (lambda: kernel_tuner, None),
    "before_after": (lambda: before_after, None),
    "polled_draw": (lambda: polled_draw, None),
}


def open_meter(nvml: SimulatedNvml, kind: str | None) -> NvmlMeter:
    if kind is None:
        return open_nvml_meter(nvml=nvml)
    return open_nvml_meter(nvml=nvml, field="instant" if nvml.sensor.has_instant else "usage")


# ---- judging ------------------------------------------------------------------------------------


class Score:
    """Errors of one protocol on one sensor."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.covered: list[bool] = []
        self.seconds: list[float] = []
        self.latencies_s: list[float] = []
        self.failed = 0

    def add(self, outcome: Outcome, truth_j: float, latency_s: float) -> None:
        self.errors.append(abs(outcome.energy_j / truth_j - 1))
        if outcome.interval_j is not None:
            low_j, high_j = outcome.interval_j
            self.covered.append(low_j <= truth_j <= high_j)
        self.seconds.append(outcome.seconds)
        self.latencies_s.append(latency_s)

    def to_json(self) -> dict[str, Any]:
        if not self.errors:
            return {"runs": 0, "failed": self.failed}
        return {
            "median_error": round(float(np.median(self.errors)), 5),
            "p95_error": round(float(np.quantile(self.errors, 0.95)), 5),
            "coverage": round(statistics.fmean(self.covered), 4) if self.covered else None,
            "seconds": round(statistics.fmean(self.seconds), 3),
            "max_seconds": round(max(self.seconds), 3),
            "runs": len(self.errors),
            "failed": self.failed,
        }

    def by_latency(self) -> dict[str, float]:
        """95th percentile of the error by decade of the launch time."""
        decades: dict[str, list[float]] = {}
        for latency_s, error in zip(self.latencies_s, self.errors, strict=True):
            decades.setdefault(f"{10 ** math.floor(math.log10(latency_s)):g} s", []).append(error)
        return {
            name: round(float(np.quantile(errors, 0.95)), 5)
            for name, errors in sorted(decades.items(), key=lambda item: float(item[0][:-2]))
        }


def bench_sensors(runs: int) -> dict[str, Any]:
    """Every protocol on every sensor class; the same kernels for all protocols."""
    found: dict[str, Any] = {}
    for name, sensor in SENSORS.items():
        found[name] = {}
        for title in PROTOCOLS:
            score = run_protocol(title, name, lambda seed, of=sensor: SimulatedCard(of, seed), runs)
            found[name][title] = score.to_json()
            if title == "tvm_energy":
                found[name][title]["p95_error_by_latency"] = score.by_latency()
    return found


def bench_noise(runs: int) -> dict[str, Any]:
    """What each protocol makes of a sensor whose updates are much noisier."""
    found: dict[str, Any] = {}
    for noise_w in NOISE_W:
        place = f"a100, noise {noise_w:g} W"

        def card(seed: int, noise_w: float = noise_w) -> SimulatedCard:
            whole_s = MeasurementPlan().budget_s
            return SimulatedCard(A100_SENSOR, seed, noise_w=noise_w, budget_s=whole_s)

        found[place] = {
            title: run_protocol(title, place, card, runs).to_json() for title in PROTOCOLS
        }
    return found


def run_protocol(
    title: str, place: str, new_card: Callable[[int], SimulatedCard], runs: int
) -> Score:
    new_protocol, kind = PROTOCOLS[title]
    protocol = new_protocol()
    score = Score()
    for seed in range(runs):
        card = new_card(seed)
        meter = open_meter(card.nvml, kind)
        try:
            outcome = protocol(card, meter, seed)
        except TvmEnergyError as exc:
            score.failed += 1
            print(f"{place} {title} run {seed}: {exc}", file=sys.stderr)
            continue
        score.add(outcome, card.truth_j, card.latency_s)
    report(place, title, score.to_json())
    return score


def goals_met(sensors: dict[str, Any]) -> dict[str, bool]:
    """Whether ``tvm_energy`` meets each goal on every sensor class."""
    ours = [protocols["tvm_energy"] for protocols in sensors.values()]
    low, high = GOALS["coverage"]  # type: ignore[misc]
    met = {
        key: all(score[key] <= GOALS[key] for score in ours)
        for key in ("median_error", "p95_error", "seconds")
    }
    return {**met, "coverage": all(low <= score["coverage"] <= high for score in ours)}


def report(place: str, title: str, score: dict[str, Any]) -> None:
    if not score["runs"]:
        print(f"{place:<28} {title:<18} no result")
        return
    coverage = "" if score["coverage"] is None else f"{score['coverage']:.1%}"
    print(
        f"{place:<28} {title:<18} median {score['median_error']:7.2%}  p95 {score['p95_error']:7.2%}  "
        f"coverage {coverage:>6}  {score['seconds']:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200 runs instead of 400")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--runs", type=positive, help="runs of each protocol on each sensor")
    arguments = parser.parse_args()
    runs = (200 if arguments.quick else 400) if arguments.runs is None else arguments.runs
    out = sys.stdout
    if arguments.json:
        sys.stdout = sys.stderr  # the table is for people
    sensors = bench_sensors(runs)
    result = {
        "simulated": True,
        "runs": runs,
        "sensors": sensors,
        "goals": GOALS,
        "goals_met": goals_met(sensors),
        "noise": bench_noise(max(1, runs // 2)),
        "traces": power_traces.bench(PROTOCOLS, Score, open_meter, report),
        "counter_logs": power_traces.bench_counter_logs(Score, report),
    }
    sys.stdout = out
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
