"""Which kernel of a task is the fastest, which is chosen, and which are as good within the error.

The one place that decides a winner: the search, the database, replay and reports all call it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.objective import Objective
from tvm_energy.records import CandidateRecord, FinalRecord, Record

#: Two energies are told apart when they differ by more than this many standard errors of the difference.
TIE_SIGMA = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What is known of one kernel.

    Attributes:
        key: hash of its schedule trace.
        latency_s: seconds a launch; from the finalists' windows where it was one.
        measured: its energy measurement, or None.
        predicted_energy_j: the model's belief; None without one.
        final: True when `measured` comes from the finalists' long, interleaved windows.
        clock_mhz: the core clock that was locked for it; None where the driver chose the clock.
    """

    key: str
    latency_s: float
    measured: EnergyMeasurement | None = None
    predicted_energy_j: float | None = None
    final: bool = False
    clock_mhz: float | None = None

    @property
    def energy_j(self) -> float | None:
        """Measured joules a launch; None when the energy was not measured."""
        return None if self.measured is None else self.measured.energy_j


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The outcome for one task.

    Attributes:
        fastest: the kernel of least latency among those that could win.
        best: the kernel that the objective chooses.
        ties: kernels that are as good as `best` within the error of the measurements, `best` left out.
        at_default: where kernel and clock were chosen together, the kernel that would have been chosen at
            the clock that the driver takes; else None.
    """

    fastest: Kernel
    best: Kernel
    ties: tuple[Kernel, ...] = ()
    at_default: Kernel | None = None


def costs(kernels: Sequence[Kernel], objective: Objective, best_latency_s: float) -> list[float]:
    """Cost of each kernel from measured values; infinite where a needed energy was not measured."""
    return _costs(kernels, [kernel.energy_j for kernel in kernels], objective, best_latency_s)


def choose(kernels: Iterable[Kernel], objective: Objective) -> Choice | None:
    """Fastest, chosen and tied kernels; None when no kernel can win.

    Only a measured kernel wins: where the objective needs energy, kernels without a measurement are
    left out. Finalists, where there are any, are compared among themselves alone, because their
    windows were interleaved and so share temperature and clocks. Where two costs lie within
    `TIE_SIGMA` standard errors of their difference, they tie, and the faster kernel wins.
    """
    pool = eligible(kernels, objective)
    if not pool:
        return None
    fastest = min(pool, key=lambda kernel: kernel.latency_s)
    values = costs(pool, objective, fastest.latency_s)
    lead = min(range(len(pool)), key=values.__getitem__)
    if not objective.needs_energy:
        return Choice(fastest=fastest, best=pool[lead])
    errors = _cost_errors(pool, values, objective, fastest.latency_s)
    tied = [
        kernel
        for index, kernel in enumerate(pool)
        if index == lead
        or values[index] - values[lead] <= TIE_SIGMA * math.hypot(errors[index], errors[lead])
    ]
    best = min(tied, key=lambda kernel: kernel.latency_s)
    return Choice(
        fastest=fastest, best=best, ties=tuple(kernel for kernel in tied if kernel is not best)
    )


def eligible(kernels: Iterable[Kernel], objective: Objective) -> list[Kernel]:
    """The kernels that may win: measured ones, and only finalists where there are any."""
    pool = [kernel for kernel in kernels if kernel.measured or not objective.needs_energy]
    return [kernel for kernel in pool if kernel.final] or pool


def _costs(
    kernels: Sequence[Kernel],
    energies_j: Sequence[float | None],
    objective: Objective,
    best_latency_s: float,
) -> list[float]:
    latency_s = np.array([kernel.latency_s for kernel in kernels])
    energy_j = np.array([np.nan if value is None else value for value in energies_j])
    with np.errstate(over="ignore"):  # beyond the range of a float is as bad as infinite
        values = objective.cost(latency_s, energy_j, best_latency_s)
    return [float(value) if np.isfinite(value) else float("inf") for value in values]


def _cost_errors(
    kernels: Sequence[Kernel], values: Sequence[float], objective: Objective, best_latency_s: float
) -> list[float]:
    """Standard error of each cost: how far it moves with one standard error of the energy.

    Zero for a kernel that is not acceptable, so that it never ties with one that is.
    """
    raised_j = [
        None if kernel.measured is None else kernel.measured.energy_j + kernel.measured.stderr_j
        for kernel in kernels
    ]
    raised = _costs(kernels, raised_j, objective, best_latency_s)
    return [
        upper - value if math.isfinite(upper) else 0.0
        for upper, value in zip(raised, values, strict=True)
    ]


def kernels_by_workload(records: Iterable[Record]) -> dict[str, dict[str, Kernel]]:
    """All kernels that ran, by workload hash and key, with finalists' measurements put in.

    A kernel that a continued run met again keeps its first latency and any measured energy.
    """
    kernels: dict[str, dict[str, Kernel]] = {}
    finals: list[FinalRecord] = []
    for record in records:
        if isinstance(record, CandidateRecord) and record.latency_s is not None:
            known = kernels.setdefault(record.workload, {}).get(record.key)
            kernels[record.workload][record.key] = Kernel(
                key=record.key,
                latency_s=known.latency_s if known else record.latency_s,
                measured=record.measured or (known.measured if known else None),
                predicted_energy_j=(
                    record.predicted_energy_j
                    if record.predicted_energy_j is not None or known is None
                    else known.predicted_energy_j
                ),
            )
        elif isinstance(record, FinalRecord):
            finals.append(record)
    for final in finals:
        put_final(kernels.setdefault(final.workload, {}), final)
    return kernels


def put_final(kernels: dict[str, Kernel], final: FinalRecord) -> None:
    """Replace a kernel's latency and energy by those of its final measurement.

    Finals are compared among themselves only while they are up to date: when kernels were added
    after them (a run was continued), they count as ordinary measurements.
    """
    known = kernels.get(final.key)
    kernels[final.key] = Kernel(
        key=final.key,
        latency_s=final.measured.latency_s,
        measured=final.measured,
        predicted_energy_j=known.predicted_energy_j if known else None,
        final=final.candidates == len(kernels),
    )
