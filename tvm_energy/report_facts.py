"""Figures that the HTML and Markdown reports share, worked out from a summary and its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.ranking import TIE_SIGMA, Kernel
from tvm_energy.records import CandidateRecord, ClockRecord, FinalRecord, Record, RoundRecord
from tvm_energy.replay import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What the choice saves against the fastest kernels, for one pass of the network.

    Attributes:
        energy_j: joules saved.
        margin_j: `TIE_SIGMA` standard errors of that.
        fraction, margin: the same as parts of the fastest kernels' energy.
        slowdown: extra time, as a part of the fastest kernels' time.
    """

    energy_j: float
    margin_j: float
    fraction: float
    margin: float
    slowdown: float


def saving(summary: RunSummary) -> Saving | None:
    """The saving of all tasks together; None where an energy is missing.

    A task whose chosen kernel is the fastest one, at the same clock, saves exactly nothing, without error.
    """
    totals = summary.totals
    if totals is None or totals.best_energy_j is None or not totals.fastest_energy_j:
        return None
    variance = 0.0
    for task in summary.tasks:
        if (
            task.fastest
            and task.best
            and (task.fastest.key, None) != (task.best.key, task.best.clock_mhz)
        ):
            for kernel in (task.fastest, task.best):
                variance += (task.weight * (kernel.energy_stderr_j or 0.0)) ** 2
    saved_j = totals.fastest_energy_j - totals.best_energy_j
    margin_j = TIE_SIGMA * math.sqrt(variance)
    return Saving(
        energy_j=saved_j,
        margin_j=margin_j,
        fraction=saved_j / totals.fastest_energy_j,
        margin=margin_j / totals.fastest_energy_j,
        slowdown=totals.best_latency_s / totals.fastest_latency_s - 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the tuning itself took, as far as the log tells.

    Attributes:
        device_s: device time of all energy measurements (virtual on a simulated device).
        device_j: joules of that time: mean power of each kernel times its measuring time. Building,
            timing runs and the host's own energy are not in it.
        host_s: wall seconds of the rounds' own parts that the log names.
        passes: passes of the network after which `device_j` has been saved; None when nothing is.
    """

    device_s: float
    device_j: float
    host_s: float
    passes: float | None


def effort(records: Iterable[Record], summary: RunSummary) -> Effort:
    """What the tuning took, and when it has paid for itself."""
    device_s = device_j = host_s = 0.0
    for record in records:
        if isinstance(record, (CandidateRecord, FinalRecord, ClockRecord)) and record.measured:
            device_s += record.measured.device_s
            device_j += record.measured.device_s * record.measured.power_w
        elif isinstance(record, RoundRecord):
            host_s += math.fsum(
                seconds
                for name, seconds in record.seconds.items()
                if isinstance(seconds, (int, float)) and not name.endswith("_device")
            )
    saved = saving(summary)
    pays = saved is not None and saved.energy_j > saved.margin_j and device_j > 0
    return Effort(
        device_s=device_s,
        device_j=device_j,
        host_s=host_s,
        passes=device_j / saved.energy_j if pays and saved else None,
    )


def pareto_front(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Measured kernels that no other one beats in both time and energy, fastest first."""
    front: list[Kernel] = []
    measured = [kernel for kernel in kernels if kernel.energy_j is not None]
    for kernel in sorted(measured, key=lambda item: (item.latency_s, item.energy_j or 0.0)):
        if not front or (kernel.energy_j or 0.0) < (front[-1].energy_j or 0.0):
            front.append(kernel)
    return front


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterQuality:
    """What the measurements of one task say about themselves; ranges are (least, largest)."""

    measurements: int
    methods: tuple[str, ...]
    scopes: tuple[str, ...]
    clock_mhz: tuple[float, float] | None
    temperature_c: tuple[float, float] | None
    throttle_reasons: tuple[str, ...]
    sensor_updates: tuple[float, float] | None
    median_relative_stderr: float | None
    doubts: tuple[str, ...]


def meter_quality(measurements: Sequence[EnergyMeasurement]) -> MeterQuality:
    """Sum up how well energies were measured."""
    errors = sorted(item.relative_stderr for item in measurements)
    return MeterQuality(
        measurements=len(measurements),
        methods=_names(f"{item.meter}, {item.method}" for item in measurements),
        scopes=_names(item.scope for item in measurements),
        clock_mhz=_range(item.clock_mhz for item in measurements),
        temperature_c=_range(item.temperature_c for item in measurements),
        throttle_reasons=_names(
            reason for item in measurements for reason in item.throttle_reasons
        ),
        sensor_updates=_range(float(item.sensor_updates) for item in measurements),
        median_relative_stderr=errors[len(errors) // 2] if errors else None,
        doubts=_names(item.quality for item in measurements if item.quality != "good"),
    )


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _range(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
