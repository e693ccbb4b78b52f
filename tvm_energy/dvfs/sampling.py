"""Which clock to measure next, and when to stop.

A sweep locks a clock and measures every workload there, so all of them share the clocks:

1. the lowest, the highest, and the one where the ridge of the voltage curve is to be expected, 0.72 of the
   highest (arXiv:2211.07260);
2. then the clock of least predicted energy, over all workloads. Prediction: latency interpolated between
   the measured points, power by the `ridge` form, whose prior stands in for the points still missing;
3. where that clock, or one close to it, is measured already: the middle of the wider gap beside it.

It may stop once no clock can be better than the chosen one by more than the allowed regret. Nothing here
looks at a value that has not been measured, and nothing is random.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tvm_energy.dvfs.curve import FittedCurve, interpolate
from tvm_energy.dvfs.forms import RIDGE, RIDGE_SHARE, Array
from tvm_energy.dvfs.separable import solve_shared
from tvm_energy.errors import ConfigurationError

#: Clocks nearer to a measured one than this share of the range, or than this many steps of the clock table,
#: are not worth a measurement.
_NEAR = 0.05
_NEAR_STEPS = 1.5


def first_clocks(clock_mhz: ArrayLike) -> list[int]:
    """Indices of the clocks to begin with: lowest, expected ridge, highest.

    Args:
        clock_mhz: clocks that can be set, MHz, ascending.

    Raises:
        ConfigurationError: fewer than two clocks.
    """
    f = np.asarray(clock_mhz, dtype=float)
    if len(f) < 2:
        raise ConfigurationError(f"a sweep needs two clocks at least, there is {len(f)}")
    ridge = int(np.argmin(np.abs(f - RIDGE_SHARE * f[-1])))
    if ridge in (0, len(f) - 1):
        ridge = len(f) // 2
    return sorted({0, ridge, len(f) - 1})


def next_clock(
    clock_mhz: ArrayLike, measured: Sequence[int], latency_s: ArrayLike, power_w: ArrayLike
) -> int | None:
    """Index of the clock to measure next; None when all have been.

    Args:
        clock_mhz: clocks that can be set, MHz, ascending, shape (n,).
        measured: indices of those measured, ascending, at least three of them or all.
        latency_s, power_w: what was measured there, shape (R, len(measured)) or (len(measured),).
    """
    f = np.asarray(clock_mhz, dtype=float)
    done = list(measured)
    if len(done) >= len(f):
        return None
    t, p = (np.atleast_2d(np.asarray(values, dtype=float)) for values in (latency_s, power_w))
    at = f[done]
    power = solve_shared(RIDGE, at, p, 1 / p**2).predict(RIDGE, f)
    energy = interpolate("latency", at, t, f) * power
    best = int(np.argmin((energy / energy.min(axis=1, keepdims=True)).mean(axis=0)))
    nearest = min(done, key=lambda index: abs(f[index] - f[best]))
    near = max(_NEAR * (f[-1] - f[0]), _NEAR_STEPS * float(np.median(np.diff(f))))
    if abs(f[nearest] - f[best]) >= near:
        return best
    return _beside(f, done, nearest)


def _beside(f: Array, done: list[int], index: int) -> int:
    """The middle of the wider unmeasured gap beside a measured clock; else of the widest anywhere."""
    gaps = [(a, b) for a, b in itertools.pairwise(done) if b - a > 1]
    beside = [gap for gap in gaps if index in gap]
    a, b = max(beside or gaps, key=lambda gap: f[gap[1]] - f[gap[0]])
    return (a + b) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyEstimate:
    """Energy over the clocks that may be requested, from latency and power fitted to a few of them.

    Attributes:
        clock_mhz: shape (n,), ascending.
        energy_j: estimate, shape (n,).
        half_width_j: of its band, shape (n,).
        chosen: index of the clock with least energy.
        regret: how much energy, relative to the least possible, the chosen clock may waste at most if
            the band holds.
    """

    clock_mhz: Array
    energy_j: Array
    half_width_j: Array
    chosen: int
    regret: float


def estimate_energy(
    clock_mhz: ArrayLike, latency: FittedCurve, power: FittedCurve
) -> EnergyEstimate:
    """Energy of each clock, what is certain about it, and the best clock.

    At the measured clocks it is the measured energy: no fit overrules a measurement.
    """
    f = np.asarray(clock_mhz, dtype=float)
    t, p = latency.through_points(f), power.through_points(f)
    energy = t * p
    width = energy * np.hypot(latency.half_width(f) / t, power.half_width(f) / p)
    chosen = int(np.argmin(energy))
    low = np.delete(energy - width, chosen)
    regret = float(energy[chosen] / low.min() - 1) if len(low) and low.min() > 0 else float("inf")
    return EnergyEstimate(
        clock_mhz=f,
        energy_j=energy,
        half_width_j=width,
        chosen=chosen,
        regret=max(0.0, regret if len(low) else 0.0),
    )
