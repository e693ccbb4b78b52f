"""A sweep: lock a clock, measure every workload, choose the next clock, stop when it cannot matter any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sampling import first_clocks, next_clock
from tvm_energy.dvfs.study import Study, study
from tvm_energy.dvfs.table import Series
from tvm_energy.errors import ConfigurationError

#: Fewer clocks say too little about a regret.
FEWEST_CLOCKS = 5


class ClockControl(Protocol):
    """A device whose core clock can be locked."""

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """Hold the core clock inside the block; release it afterwards, whatever happens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One workload at one clock.

    Attributes:
        latency_s, power_w: measured.
        effective_mhz: clock that the device ran at; None where it cannot be read.
        power_stderr: relative standard error of the power.
    """

    latency_s: float
    power_w: float
    effective_mhz: float | None = None
    power_stderr: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What came of it.

    Attributes:
        studies: one for each workload.
        order_mhz: clocks in the order in which they were measured.
        regret: of the worst workload: energy that its chosen clock may waste at most, relatively.
        certain: whether the regret is within what was asked for.
    """

    studies: list[Study]
    order_mhz: tuple[float, ...]
    regret: float
    certain: bool


def sweep(
    clock_mhz: ArrayLike,
    names: Sequence[str],
    control: ClockControl,
    measure: Callable[[float], Sequence[Point]],
    *,
    max_clocks: int = 8,
    regret: float = 0.01,
    power_limit_w: float | None = None,
    measured: Callable[[float, Sequence[Point]], None] = lambda clock, points: None,
) -> Sweep:
    """Measure workloads at few clocks and predict the others.

    Args:
        clock_mhz: clocks that can be locked.
        names: the workloads.
        control: locks a clock.
        measure: measures every workload at the clock that is locked, in the order of ``names``.
        max_clocks: clocks to measure at most.
        regret: stop when no chosen clock can waste more energy than this share.
        power_limit_w: power limit of the device, where known.
        measured: told of each clock and what was found there.

    Raises:
        ConfigurationError: too few clocks.
    """
    f = np.unique(np.asarray(clock_mhz, dtype=float))
    if max_clocks < 3:
        raise ConfigurationError(f"a sweep needs three clocks at least, got {max_clocks}")
    found: dict[int, Sequence[Point]] = {}
    order: list[float] = []
    pending: list[int] = first_clocks(f)
    while True:
        for index in pending:
            with control.locked(float(f[index])):
                found[index] = measure(float(f[index]))
            order.append(float(f[index]))
            measured(float(f[index]), found[index])
        done = sorted(found)
        studies = study(
            [_series(name, f, done, [found[i][k] for i in done]) for k, name in enumerate(names)],
            clock_mhz=f,
            power_limit_w=power_limit_w,
        )
        worst = max(one.energy.regret for one in studies if one.energy is not None)
        certain = worst <= regret
        if (certain and len(done) >= min(FEWEST_CLOCKS, max_clocks)) or len(done) >= max_clocks:
            break
        following = next_clock(
            f,
            done,
            np.array([[found[i][k].latency_s for i in done] for k in range(len(names))]),
            np.array([[found[i][k].power_w for i in done] for k in range(len(names))]),
        )
        if following is None:
            break
        pending = [following]
    return Sweep(studies=studies, order_mhz=tuple(order), regret=worst, certain=certain)


def _series(name: str, f: Array, done: Sequence[int], points: Sequence[Point]) -> Series:
    clocks = f[list(done)]
    effective = [
        clock if point.effective_mhz is None else min(point.effective_mhz, clock)
        for clock, point in zip(clocks, points, strict=True)
    ]
    return Series(
        name=name,
        clock_mhz=clocks,
        effective_mhz=np.array(effective),
        latency_s=np.array([point.latency_s for point in points]),
        power_w=np.array([point.power_w for point in points]),
        repeats=np.ones(len(points)),
        power_noise=float(np.median([point.power_stderr for point in points])),
    )


class Recorded:
    """Plays a table back as if it were a device: for sweeps from a file.

    Args:
        series: workloads with power, all measured at the same clocks.

    Raises:
        ConfigurationError: a workload lacks power, or has other clocks than the first.
    """

    def __init__(self, series: Sequence[Series]) -> None:
        for one in series:
            if one.power_w is None:
                raise ConfigurationError("a sweep needs power or energy, the table has neither")
            if not np.array_equal(one.clock_mhz, series[0].clock_mhz):
                raise ConfigurationError(
                    f"{one.name!r} and {series[0].name!r} are measured at different clocks; "
                    "sweep them one at a time"
                )
        self.series = list(series)
        self.clock_mhz = series[0].clock_mhz

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """See `ClockControl`."""
        return contextlib.nullcontext()

    def measure(self, clock_mhz: float) -> list[Point]:
        """The recorded values at that clock."""
        index = int(np.searchsorted(self.clock_mhz, clock_mhz))
        return [
            Point(
                latency_s=float(one.latency_s[index]),
                power_w=float(one.power_w[index]),
                effective_mhz=float(one.effective_mhz[index]),
                power_stderr=one.power_noise,
            )
            for one in self.series
            if one.power_w is not None
        ]
