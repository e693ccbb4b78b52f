"""What a table or a sweep says about each workload: fitted latency and power, energy, the best clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_energy.dvfs.curve import FittedCurve
from tvm_energy.dvfs.fitting import fit_latencies, fit_powers
from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sampling import EnergyEstimate, estimate_energy
from tvm_energy.dvfs.table import Series

#: Effective clocks nearer than this, relatively, are the same one.
_SAME_CLOCK = 2e-3

#: Requested over effective clock from which on the device counts as held back.
_HELD_BACK = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One workload over the clock.

    Attributes:
        series: what was measured.
        latency: its fit, s.
        power: its fit, W; None when power is not known.
        energy: over the clocks asked for; None when power is not known.
    """

    series: Series
    latency: FittedCurve
    power: FittedCurve | None
    energy: EnergyEstimate | None


def study(
    series: Sequence[Series],
    *,
    clock_mhz: Array | None = None,
    latency_form: str | None = None,
    power_form: str | None = None,
    power_limit_w: float | None = None,
) -> list[Study]:
    """Fit every series; those measured at the same clocks are taken as workloads of one device.

    Args:
        series: from `tvm_energy.dvfs.table.read_table` or a sweep.
        clock_mhz: clocks to choose from, ascending; None: those measured.
        latency_form, power_form: instead of the choice by cross-validation.
        power_limit_w: power limit of the device, where known.

    Raises:
        ConfigurationError: a form that the number of clocks does not support.
    """
    results: dict[int, Study] = {}
    points = [_points(one) for one in series]
    groups: dict[tuple[tuple[float, ...], bool, float | None], list[int]] = {}
    for index, (f, _, p, cap) in enumerate(points):
        groups.setdefault((tuple(f), p is None, cap), []).append(index)
    for (_, no_power, cap), members in groups.items():
        f = points[members[0]][0]
        t = np.array([points[index][1] for index in members])
        p = None if no_power else np.array([points[index][2] for index in members])
        noise = float(np.median([series[index].latency_noise for index in members]))
        latency = fit_latencies(
            f,
            t,
            form=latency_form,
            cap_mhz=cap,
            power_w=p,
            power_limit_w=power_limit_w,
            noise=noise,
        )
        powers: list[FittedCurve | None] = [None] * len(members)
        if p is not None:
            noise = float(np.median([series[index].power_noise for index in members]))
            caps = [curve.cap_mhz for curve in latency]
            powers[:] = fit_powers(f, p, form=power_form, cap_mhz=caps, noise=noise)
        for index, one, power in zip(members, latency, powers, strict=True):
            clocks = series[index].clock_mhz if clock_mhz is None else clock_mhz
            results[index] = Study(
                series=series[index],
                latency=one,
                power=power,
                energy=None if power is None else estimate_energy(clocks, one, power),
            )
    return [results[index] for index in range(len(series))]


def _points(series: Series) -> tuple[Array, Array, Array | None, float | None]:
    """Effective clocks (all different), latency and power there, and the cap where clocks were held back."""
    order = np.argsort(series.effective_mhz, kind="stable")
    f = series.effective_mhz[order]
    fresh = np.concatenate([[True], np.diff(f) > _SAME_CLOCK * f[1:]])
    group = np.cumsum(fresh) - 1
    weight = np.bincount(group)

    def merged(values: Array) -> Array:
        return np.bincount(group, weights=values[order]) / weight

    held_back = series.clock_mhz[-1] > _HELD_BACK * f[-1]
    return (
        merged(series.effective_mhz),
        merged(series.latency_s),
        None if series.power_w is None else merged(series.power_w),
        float(f[-1]) if held_back else None,
    )
