"""Recorded power traces of real GPUs, replayed as sensors under a virtual clock.

`scripts/data/power_traces` holds what an external meter and nvidia-smi saw of the same run of an A100 and an
RTX 3090. Each trace is replayed in two ways:

``recorded``    the values that nvidia-smi gave come back as field 186 and nvmlDeviceGetPowerUsage, at their
                moments. There is no counter: nobody recorded it.
``real power``  the power that the external meter saw, through the simulated sensor of that class of card,
                counter included.

The load ran when it ran, so a protocol may begin at different moments of it but not change it. Truth is the
external meter's mean power while the load ran (first 0.5 s left out) x time of a launch. Power
drifted by up to 3 % in those 6 s, which no interval of a shorter measurement can hold: ``coverage_meanwhile``
compares with what the external meter saw while the protocol ran. Recorded sensors of these cards read 5 % low (their gain), which no software can see; ``gain`` is the sensor's mean over
the meter's for the whole steady load, and the ``*_error_without_gain`` figures have it divided out.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import lzma
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tvm_energy.errors import TvmEnergyError
from tvm_energy.simulation.nvml import (
    A100_SENSOR,
    ADA_SENSOR,
    SensorSpec,
    SimulatedNvml,
    SimulatedNvmlError,
    SimulatedState,
)
from tvm_energy.simulation.timeline import PowerTimeline, VirtualClock

DATA = Path(__file__).parent / "data" / "power_traces"

#: Card -> class of its sensor. Ampere parts other than GA100 are like Ada (arXiv:2312.02741).
CARDS: dict[str, SensorSpec] = {"A100": A100_SENSOR, "3090": ADA_SENSOR}
RUNS = ("transient", "sq5050")
LATENCY_S = 5e-3  # of a launch in a load that is steady; any would do
SETTLED_S = 0.5
START_STEP_S = 0.1
BUDGET_S = 4.0  # a protocol must end before the load does
_UUID = "GPU-simulated"


@dataclasses.dataclass(frozen=True)
class Trace:
    """One recorded run; time 0 is the first edge of the load."""

    name: str
    board_from_s: float
    board_w: np.ndarray  # external meter, one value a millisecond
    sensor_s: np.ndarray
    sensor_w: dict[str, np.ndarray]  # "draw_w", "instant_w", ...
    edges_s: np.ndarray
    square_wave: bool

    @property
    def load_ends_s(self) -> float:
        return float(self.edges_s[-1] if self.square_wave else self.edges_s[1])

    @property
    def latency_s(self) -> float:
        """Of a launch; in a square wave one launch is one time on and off."""
        if not self.square_wave:
            return LATENCY_S
        last_on = len(self.edges_s) // 2 * 2 - 2
        return float(self.edges_s[last_on] - self.edges_s[0]) / (last_on / 2)

    def mean_power_w(self, start_s: float, end_s: float) -> float:
        """What the external meter saw between two moments, in whole launches of a square wave."""
        if self.square_wave:
            end_s = start_s + (end_s - start_s) // self.latency_s * self.latency_s
        first, last = (round((at_s - self.board_from_s) * 1e3) for at_s in (start_s, end_s))
        return float(self.board_w[first:last].mean())

    def sensor_mean_w(self, start_s: float, end_s: float) -> float:
        inside = (self.sensor_s >= start_s) & (self.sensor_s < end_s)
        return float(self.sensor_w["instant_w"][inside].mean())


def load_trace(name: str) -> Trace:
    with lzma.open(DATA / f"{name}_board.csv.xz", "rt", encoding="ascii") as file:
        from_ms = int(file.readline().split()[-2])
        board_w = np.array([float(line) for line in file])
    with lzma.open(DATA / f"{name}_sensor.csv.xz", "rt", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    edges = (DATA / f"{name}_load.csv").read_text(encoding="ascii").split()[1:]
    return Trace(
        name=name,
        board_from_s=from_ms * 1e-3,
        board_w=board_w,
        sensor_s=np.array([float(row["ms"]) for row in rows]) * 1e-3,
        sensor_w={
            key: np.array([float(row[key]) for row in rows]) for key in rows[0] if key != "ms"
        },
        edges_s=np.array([float(edge) for edge in edges]) * 1e-3,
        square_wave=name.startswith("sq"),
    )


class RecordedNvml(SimulatedNvml):
    """The sensor values of a trace, each held until the next; no counter."""

    def __init__(self, trace: Trace, clock: VirtualClock, sensor: SensorSpec) -> None:
        super().__init__(
            PowerTimeline(0.0),
            clock,
            dataclasses.replace(sensor, has_counter=False),
            name="recorded card",
            uuid=_UUID,
            power_limit_w=500.0,
            state=lambda: SimulatedState(clock_mhz=1410, temperature_c=50),
        )
        self._trace = trace

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check(handle)
        return self._milliwatts("draw_w")

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[Any]) -> list[Any]:
        values = super().nvmlDeviceGetFieldValues(handle, fields)
        for field, value in zip(fields, values, strict=True):
            if value.nvmlReturn == 0:
                number = field[0] if isinstance(field, tuple) else field
                instant = number == self.NVML_FI_DEV_POWER_INSTANT
                value.value.uiVal = self._milliwatts("instant_w" if instant else "draw_w")
        return values

    def _milliwatts(self, column: str) -> int:
        index = int(np.searchsorted(self._trace.sensor_s, self.clock.now(), side="right")) - 1
        if index < 0:
            raise SimulatedNvmlError(self.NVML_ERROR_NOT_FOUND)
        return round(float(self._trace.sensor_w[column][index]) * 1e3)


class ReplayCard:
    """A trace as a card: the load runs anyway, launches are counted by its time."""

    has_counter = False
    budget_s = BUDGET_S

    def __init__(self, trace: Trace, sensor: SensorSpec, recorded: bool, seed: int) -> None:
        self.latency_s = trace.latency_s
        self.clock = VirtualClock(trace.board_from_s + 0.05)
        self.nvml: SimulatedNvml
        if recorded:
            self.nvml = RecordedNvml(trace, self.clock, sensor)
        else:
            self.has_counter = sensor.has_counter
            self.nvml = SimulatedNvml(
                _timeline(trace.name),
                self.clock,
                dataclasses.replace(sensor, gain=1.0, offset_w=0.0),
                name="replayed card",
                uuid=_UUID,
                power_limit_w=500.0,
                state=lambda: SimulatedState(clock_mhz=1410, temperature_c=50),
                seed=seed,
            )
        self.load = ReplayLoad(self)

    def timed_run_s(self) -> float:
        return self.latency_s


class ReplayLoad:
    """Launches of the trace's load: only time passes."""

    def __init__(self, card: ReplayCard) -> None:
        self._card = card
        self._until_s = card.clock.now()

    def enqueue(self, launches: int) -> None:
        start_s = max(self._card.clock.now(), self._until_s)
        self._until_s = start_s + launches * self._card.latency_s

    def synchronize(self) -> None:
        self._card.clock.advance_to(self._until_s)


@functools.cache
def _timeline(name: str) -> PowerTimeline:
    """The external meter's power; nothing is appended to it any more."""
    trace = load_trace(name)
    timeline = PowerTimeline(float(np.median(trace.board_w[:500])), history_s=1e6)
    for index, power_w in enumerate(trace.board_w):
        start_s = max(trace.board_from_s + index * 1e-3, timeline.end_s if index else -1e9)
        timeline.append(start_s, 1e-3, float(power_w))
    return timeline


#: Protocols that are played with a counter only; ``tvm_energy_power`` is the first without one.
_NEED_COUNTER = ("before_after", "tvm_energy", "tvm_energy_race")


def _starts(trace: Trace) -> Iterator[float]:
    start_s = 0.0
    while start_s + BUDGET_S < trace.load_ends_s:
        yield start_s
        start_s += START_STEP_S


def bench(
    protocols: dict[str, tuple[Callable[[], Callable[..., Any]], str | None]],
    new_score: Callable[[], Any],
    open_meter: Callable[..., Any],
    report: Callable[[str, str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Every protocol on every trace, begun at moments 0.1 s apart while the load runs."""
    found: dict[str, Any] = {}
    for card_name, run in itertools.product(CARDS, RUNS):
        sensor, name = CARDS[card_name], f"{run}_{card_name}"
        trace, steady = load_trace(name), load_trace(f"transient_{card_name}")
        span = (SETTLED_S, trace.load_ends_s - 0.1)
        truth_j = trace.mean_power_w(*span) * trace.latency_s
        span = (SETTLED_S, steady.load_ends_s - 0.1)
        gain = steady.sensor_mean_w(*span) / steady.mean_power_w(*span)
        for recorded in (True, False):
            place = f"{name} {'recorded' if recorded else 'real power'}"
            found[place] = {"gain": round(gain, 4) if recorded else 1.0}
            for title, (new_protocol, kind) in protocols.items():
                protocol = new_protocol()
                score, corrected, meanwhile = new_score(), new_score(), new_score()
                for seed, start_s in enumerate(_starts(trace)):
                    card = ReplayCard(trace, sensor, recorded, seed)
                    if not card.has_counter and title in _NEED_COUNTER:
                        continue
                    meter = open_meter(card.nvml, kind)
                    card.clock.advance_to(start_s)
                    try:
                        outcome = protocol(card, meter, seed)
                    except TvmEnergyError:
                        score.failed += 1
                        continue
                    score.add(outcome, truth_j, trace.latency_s)
                    corrected.add(outcome, truth_j * gain, trace.latency_s)
                    seen_w = trace.mean_power_w(start_s + SETTLED_S, card.clock.now())
                    factor = gain if recorded else 1.0
                    meanwhile.add(outcome, seen_w * trace.latency_s * factor, trace.latency_s)
                values = score.to_json()
                if not values["runs"] and not values["failed"]:
                    continue
                if values["runs"]:
                    values["coverage_meanwhile"] = meanwhile.to_json()["coverage"]
                if recorded and values["runs"]:
                    without = corrected.to_json()
                    for key in ("median_error", "p95_error", "coverage"):
                        values[f"{key}_without_gain"] = without[key]
                found[place][title] = values
                report(place, title, values)
    return found


def bench_counter_logs(
    new_score: Callable[[], Any], report: Callable[[str, str, dict[str, Any]], None]
) -> dict[str, Any]:
    """How far one difference of two counter readings is off, for real kernels of 45 ms to 8 s.

    Truth is the mean power of all runs at this clock and the two next to it on each side (fifty runs)
    x time. Our protocol cannot be replayed here: the logs hold no reading inside a run.
    """
    found: dict[str, Any] = {}
    for name in ("icicle", "cuzk"):
        runs: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        with lzma.open(DATA / f"{name}_counter.csv.xz", "rt", encoding="ascii") as file:
            for row in csv.DictReader(file):
                key = int(row["log2_size"]), int(row["clock_mhz"])
                runs[key].append((float(row["time_ms"]) * 1e-3, float(row["energy_mj"]) * 1e-3))
        for size in sorted({size for size, _ in runs}):
            one, ten, zeros = new_score(), new_score(), 0
            clocks = sorted(clock for found_size, clock in runs if found_size == size)
            for index, clock in enumerate(clocks):
                near = [runs[size, other] for other in clocks[max(0, index - 2) : index + 3]]
                around = [run for group in near for run in group]
                power_w = sum(j for _, j in around) / sum(s for s, _ in around)
                for seconds, energy_j in runs[size, clock]:
                    one.add(_Reading(energy_j, seconds), power_w * seconds, seconds)
                    zeros += energy_j == 0
                seconds = sum(s for s, _ in runs[size, clock])
                energy_j = sum(j for _, j in runs[size, clock])
                ten.add(_Reading(energy_j, seconds), power_w * seconds, seconds)
            place = f"{name} 2^{size} ({statistics.median(one.latencies_s):.3g} s a run)"
            found[place] = {
                "before_after": one.to_json() | {"zeros": round(zeros / len(one.errors), 4)},
                "before_after_ten_runs": ten.to_json(),
            }
            for title, values in found[place].items():
                report(place, title, values)
    return found


@dataclasses.dataclass(frozen=True)
class _Reading:
    energy_j: float
    seconds: float
    interval_j: tuple[float, float] | None = None
