"""Which clock: least energy for a deadline, least energy-delay product, or a price on time.

Decisions are made on the discrete table of clocks, for one clock over a whole network or for one per
block with a cost of switching. No model is assumed: the table may hold measurements or a fit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from tvm_energy.dvfs.clock_table import ClockTable
from tvm_energy.dvfs.trellis import Path, Trellis
from tvm_energy.errors import ConfigurationError, DeadlineImpossible

__all__ = [
    "ClockPlan",
    "Deadline",
    "EnergyDelay",
    "Goal",
    "PricedTime",
    "Switching",
    "front",
    "plan",
]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Least energy with a latency of at most ``seconds``."""

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("deadline", self.seconds, "s")


@dataclass(frozen=True, slots=True)
class EnergyDelay:
    """Least E T^exponent: 1 is the energy-delay product, 2 weighs time more (ED2P)."""

    exponent: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("exponent of the energy-delay product", self.exponent, "")


@dataclass(frozen=True, slots=True)
class PricedTime:
    """Least E + watts T: ``watts`` joules may be spent to save one second.

    Zeus's cost eta E + (1 - eta) P_max T is the case watts = (1 - eta) P_max / eta.
    """

    watts: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.watts) and self.watts >= 0):
            raise ConfigurationError(f"the price of time must be 0 W or more, got {self.watts}")


Goal = Deadline | EnergyDelay | PricedTime


@dataclass(frozen=True, slots=True)
class Switching:
    """What one change of the clock between two blocks costs (setting the first clock is free)."""

    seconds: float = 0.0
    joules: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.seconds, self.joules):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"switching must cost 0 or more, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPlan:
    """Clocks chosen, and what they cost.

    Attributes:
        clocks_mhz: one for each block.
        latency_s, energy_j: totals, switching included.
        switches: changes of clock between blocks.
        gap: energy (for a deadline) is at most this share above the least possible; 0 otherwise.
    """

    clocks_mhz: tuple[float, ...]
    latency_s: float
    energy_j: float
    switches: int
    gap: float = 0.0


def plan(
    table: ClockTable,
    goal: Goal,
    *,
    per_block: bool = False,
    switching: Switching | None = None,
    tolerance: float = 1e-5,
) -> ClockPlan:
    """The best clocks for a goal.

    Exact: for one clock by comparing all, for one per block as `trellis` describes. With a deadline and
    one clock per block the search ends when the energy is proven to be within ``tolerance`` of
    the least; `ClockPlan.gap` is what was proven.

    Args:
        table: the choices.
        goal: `Deadline`, `EnergyDelay` or `PricedTime`.
        per_block: one clock for each block instead of one for all.
        switching: cost of a change between blocks; free when left out.
        tolerance: relative; 0 asks for the very best.

    Raises:
        DeadlineImpossible: no choice meets the deadline; it names the nearest that can be met.
    """
    if not 0 <= tolerance < 1:
        raise ConfigurationError(f"tolerance must be from 0 to below 1, got {tolerance}")
    trellis = _trellis(table, per_block, switching)
    if isinstance(goal, Deadline):
        path, bound = _within(trellis, goal.seconds, tolerance if per_block else 0.0)
        return _plan(table, path, gap=max(0.0, path.energy_j / bound - 1))
    if isinstance(goal, PricedTime):
        return _plan(table, trellis.cheapest(1, goal.watts))

    def product(latency_s: float, energy_j: float) -> float:
        return math.log(energy_j) + goal.exponent * math.log(latency_s)

    best = min(trellis.hull(product), key=lambda path: product(path.latency_s, path.energy_j))
    return _plan(table, best)


def front(
    table: ClockTable,
    *,
    per_block: bool = False,
    switching: Switching | None = None,
    limit: int = 50,
) -> list[ClockPlan]:
    """Choices that no other beats in both latency and energy, fastest first.

    With one clock: all of them. With one per block there are too many: the ``limit`` most
    telling corners of the lower convex hull; each is the exact optimum of some price of time.
    """
    if limit < 2:
        raise ConfigurationError(f"a front needs at least 2 points, got {limit}")
    if per_block:
        corners = _trellis(table, per_block, switching).hull()
        paths = [path for _, path in zip(range(limit), corners, strict=False)]
    else:
        trellis = _trellis(table, per_block, switching)
        paths = [trellis.evaluate(np.array([index])) for index in range(len(table.clocks_mhz))]
    paths.sort(key=lambda path: (path.latency_s, path.energy_j))
    kept: list[Path] = []
    for path in paths:
        if not kept or path.energy_j < kept[-1].energy_j:
            kept.append(path)
    return [_plan(table, path) for path in kept]


def _trellis(table: ClockTable, per_block: bool, switching: Switching | None) -> Trellis:
    switching = switching or Switching()
    if not per_block:
        table = table.whole()
    return Trellis(table.latency_s, table.energy_j, switching.seconds, switching.joules)


def _within(trellis: Trellis, deadline_s: float, tolerance: float) -> tuple[Path, float]:
    found = trellis.within(deadline_s, tolerance)
    if found is None:
        nearest = trellis.cheapest(0, 1).latency_s
        raise DeadlineImpossible(
            f"no clock meets a deadline of {deadline_s:.6g} s; the nearest possible is "
            f"{nearest:.6g} s",
            nearest,
        )
    return found


def _plan(table: ClockTable, path: Path, gap: float = 0.0) -> ClockPlan:
    choice = (
        path.choice if len(path.choice) == len(table.blocks) else path.choice * len(table.blocks)
    )
    return ClockPlan(
        clocks_mhz=tuple(float(table.clocks_mhz[index]) for index in choice),
        latency_s=path.latency_s,
        energy_j=path.energy_j,
        switches=sum(a != b for a, b in itertools.pairwise(choice)),
        gap=gap,
    )


def _check_positive(what: str, value: float, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"the {what} must be positive, got {value} {unit}".rstrip())
