"""At which clocks the finalists are measured, and the confirmation of what is chosen.

::

    half of the highest clock, and where the voltage curve's ridge is to be expected (dvfs.sampling)
          │
       fit        latency and power of every finalist over the clock (dvfs.study); the finalists' own
          │       measurement, at the clock that the driver takes, is a point of the fit, too
       predict    cost of the network at every clock that can be locked
          │
       measure    the clock that is predicted to be the best; where none is predicted to be better than what
          │       was measured: the one that could be the best if its uncertainty turned out well
          └─► again, until nothing can be better any more, or the allowed number of clocks is reached
       confirm    the chosen pairs are measured with the finalists' long windows; where that changes the choice,
                  the search goes on

Only measured pairs are chosen (`tvm_energy.clock_choice`). Devices are functions here, so that a GPU, a
simulation and a test run the same code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_energy.clock_choice import PER_KERNEL, best_options
from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sampling import first_clocks
from tvm_energy.dvfs.study import study
from tvm_energy.dvfs.table import Series
from tvm_energy.errors import ConfigurationError
from tvm_energy.measurement import EnergyMeasurement
from tvm_energy.ranking import Kernel
from tvm_energy.session import Session

#: Which clocks, or which pairs.
Marks = NDArray[np.bool_]

#: Fewer locked clocks do not support a fit.
FEWEST_CLOCKS = 3

#: The first clocks lie above this share of the highest: further down, latency passes most limits.
_LOWEST_SHARE = 0.5

#: A clock is worth a measurement when it promises to lower the cost by this share.
_LEAST_GAIN = 0.002

#: Clocks that many steps of the table from a measured one do not become likely by uncertainty alone.
_NEAR_STEPS = 1.5

#: What could be at best is not taken to lie below this share of what is predicted.
_OPTIMISM = 0.5

#: A pair that could not be measured counts as that many times worse than predicted.
_NEVER = 1e6

Measured = Mapping[str, "EnergyMeasurement | str"]

#: Measures kernels of one task (workload, keys, whether with long windows) at the clock that is locked;
#: a reason where it failed.
MeasureAt = Callable[[str, Sequence[str], bool], Measured]


def check_clocks(clocks: int, finalists: int, needs_energy: bool) -> None:
    """Refuse what cannot be done.

    Raises:
        ConfigurationError: naming the number and what to do.
    """
    if clocks < FEWEST_CLOCKS:
        raise ConfigurationError(
            f"clocks must be at least {FEWEST_CLOCKS}, got {clocks}: fewer do not support a fit"
        )
    if finalists < 1:
        raise ConfigurationError(
            "clocks are chosen among the finalists, and there are none; let --finalists be 1 or more"
        )
    if not needs_energy:
        raise ConfigurationError(
            "the objective 'latency' does not ask for energy, so the highest clock is always the best; "
            "leave --clocks out, or choose an objective such as energy:slack=0.05"
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """Latency and energy of the finalists of one task, shape (finalists, clocks + 1).

    The last column is the default clock. `measured` marks what is; the rest is predicted, `latency_low_s` and
    `energy_low_j` as it could be at best.
    """

    latency_s: Array
    energy_j: Array
    latency_low_s: Array
    energy_low_j: Array
    measured: Marks

    @property
    def complete(self) -> Marks:
        """Columns in which all finalists are measured."""
        return np.asarray(self.measured.all(axis=0))

    def values(self, optimistic: bool) -> tuple[Array, Array]:
        low = (self.latency_low_s, self.energy_low_j)
        return low if optimistic else (self.latency_s, self.energy_j)


class ClockSearch:
    """One search over the clocks of one device.

    Args:
        session: with finalists; takes in what is measured.
        clock_mhz: clocks that can be locked.
        most: locked clocks at which a finalist is measured at most, confirmations not counted.
        locked: holds the core clock inside the block.
        measure: measures at that clock.
        power_limit_w: of the device, where known.
        message: is told what is done.
    """

    def __init__(
        self,
        session: Session,
        clock_mhz: Sequence[float] | Array,
        most: int,
        *,
        locked: Callable[[float], contextlib.AbstractContextManager[object]],
        measure: MeasureAt,
        power_limit_w: float | None = None,
        message: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.session = session
        self.clock_mhz = np.unique(np.asarray(clock_mhz, dtype=float))
        self.most = most
        self._locked = locked
        self._measure = measure
        self._power_limit_w = power_limit_w
        self._message = message
        self._failed: set[tuple[str, str, float]] = set()
        self._finals = {
            workload: finals
            for workload in session.task_names()
            if (finals := session.finals(workload))
        }

    @property
    def _per_kernel(self) -> bool:
        return self.session.clocks == PER_KERNEL

    def run(self) -> None:
        """Measure until the choice is certain enough or the number of clocks is reached, then confirm."""
        if not self._finals:
            return
        above = self.clock_mhz[self.clock_mhz >= _LOWEST_SHARE * self.clock_mhz[-1]]
        # The highest is not among the first: it is what the default clock comes close to.
        first = [float(above[index]) for index in first_clocks(above)[:2]]
        self._complete()
        for clock in first:
            self._at({workload: clock for workload in self._open()})
        while True:
            while self._open() and (wanted := self._next()):
                for clock in sorted(set(wanted.values())):
                    self._at({workload: c for workload, c in wanted.items() if c == clock})
            if not self._confirm():
                return

    # -- measuring -----------------------------------------------------------------------------

    def _complete(self) -> None:
        """Measure what an interrupted run, or one with other finalists, has left out at its clocks."""
        clocks = {workload: self._clocks(workload) for workload in self._finals}
        shared = sorted(set().union(*clocks.values()))
        for clock in shared:
            self._at({w: clock for w in self._finals if not self._per_kernel or clock in clocks[w]})

    def _clocks(self, workload: str) -> set[float]:
        """Clocks at which finalists of a task were measured, or could not be."""
        known = {
            clock for key, clock in self.session.points(workload) if key in self._finals[workload]
        }
        return known | {clock for w, _, clock in self._failed if w == workload}

    def _open(self) -> list[str]:
        """Tasks that may be measured at another clock."""
        return [workload for workload in self._finals if len(self._clocks(workload)) < self.most]

    def _at(self, wanted: Mapping[str, float], keys: Sequence[str] = ()) -> None:
        """Lock a clock and measure there what is missing; all ``wanted`` are of the same clock.

        Args:
            wanted: clock by workload.
            keys: measure these, one for each workload, with long windows, although they were measured.
        """
        jobs: dict[str, list[str]] = {}
        for index, (workload, clock) in enumerate(wanted.items()):
            missing = [
                key
                for key in self._finals[workload]
                if (key, clock) not in self.session.points(workload)
                and (workload, key, clock) not in self._failed
            ]
            jobs[workload] = [keys[index]] if keys else missing
        jobs = {workload: each for workload, each in jobs.items() if each}
        if not jobs:
            return
        clock = next(iter(wanted.values()))
        count = sum(map(len, jobs.values()))
        what = "confirming the choice" if keys else "measuring finalists"
        self._message(
            f"{what} at {clock:g} MHz: {count} kernel{'s' * (count > 1)} of {len(jobs)} task"
            f"{'s' * (len(jobs) > 1)}"
        )
        with self._locked(clock):
            for workload, each in jobs.items():
                results = self._measure(workload, each, bool(keys))
                good = {k: r for k, r in results.items() if isinstance(r, EnergyMeasurement)}
                self.session.record_clock(workload, clock, good, confirmed=bool(keys))
                for key in each:
                    if key not in good:
                        self._failed.add((workload, key, clock))
                        reason = results.get(key, "no result")
                        self._message(
                            f"a finalist could not be measured at {clock:g} MHz: {reason}"
                        )

    def _confirm(self) -> bool:
        """Measure the chosen pairs with long windows; False when all of them have been."""
        todo: dict[float, dict[str, str]] = {}
        for workload, choice in self.session.choices().items():
            clock, key = choice.best.clock_mhz, choice.best.key
            if clock is None or workload not in self._finals:
                continue
            point = self.session.points(workload)[key, clock]
            if not point.confirmed and (workload, key, clock) not in self._failed:
                todo.setdefault(clock, {})[workload] = key
        for clock, keys in sorted(todo.items()):
            self._at(dict.fromkeys(keys, clock), list(keys.values()))
        return bool(todo)

    # -- choosing the next clock -----------------------------------------------------------------

    def _next(self) -> dict[str, float]:
        """The clock to measure next, by workload; empty when no further one is worth it."""
        try:
            tables = self._tables()
        except ConfigurationError as exc:
            self._message(f"no further clock is looked for: {exc}")
            return {}
        return self._next_per_kernel(tables) if self._per_kernel else self._next_shared(tables)

    def _next_shared(self, tables: Mapping[str, _Table]) -> dict[str, float]:
        measured = np.asarray(np.all([table.complete for table in tables.values()], axis=0))
        same = np.append(self._same_as_default(), True)
        if (measured | same).all():
            return {}
        predicted, at_best = (
            np.array([self._cost_at(tables, column, low) for column in range(len(measured))])
            for low in (False, True)
        )
        limit = (1 - _LEAST_GAIN) * predicted[measured].min()
        near = np.append(self._near(measured[:-1]), True)
        for costs, left_out in ((predicted, measured | same), (at_best, near | same)):
            costs = np.where(left_out, np.inf, costs)
            best = int(np.argmin(costs))
            if costs[best] < limit:
                return dict.fromkeys(tables, float(self.clock_mhz[best]))
        gap = self._widest_gap(measured[:-1])
        if gap is None or all(len(self._clocks(w)) >= FEWEST_CLOCKS for w in tables):
            return {}
        return dict.fromkeys(tables, gap)

    def _cost_at(self, tables: Mapping[str, _Table], column: int, optimistic: bool) -> float:
        values = [table.values(optimistic) for table in tables.values()]
        _, cost = self._best(
            tables, [t[:, column] for t, _ in values], [e[:, column] for _, e in values]
        )
        return cost

    def _next_per_kernel(self, tables: Mapping[str, _Table]) -> dict[str, float]:
        known = [table.measured for table in tables.values()]
        values = [table.values(False) for table in tables.values()]
        _, cost = self._best(
            tables,
            [t[m] for (t, _), m in zip(values, known, strict=True)],
            [e[m] for (_, e), m in zip(values, known, strict=True)],
        )
        open_ = self._open()
        for optimistic in (False, True):
            values = [self._worth_it(table, optimistic) for table in tables.values()]
            chosen, promised = self._best(
                tables, [t.ravel() for t, _ in values], [e.ravel() for _, e in values]
            )
            wanted = {}
            for (workload, table), index in zip(tables.items(), chosen, strict=True):
                row, column = divmod(index, table.measured.shape[1])
                if workload in open_ and not table.measured[row, column]:
                    wanted[workload] = float(self.clock_mhz[column])
            if wanted and promised < (1 - _LEAST_GAIN) * cost:
                return wanted
        return {
            workload: gap
            for workload, table in tables.items()
            if len(self._clocks(workload)) < FEWEST_CLOCKS
            and (gap := self._widest_gap(table.complete[:-1])) is not None
        }

    def _best(
        self, tables: Mapping[str, _Table], latency_s: Sequence[Array], energy_j: Sequence[Array]
    ) -> tuple[tuple[int, ...], float]:
        weights = [self.session.weight(workload) for workload in tables]
        fastest_s = sum(
            weight * float(table.latency_s[:, -1].min())
            for weight, table in zip(weights, tables.values(), strict=True)
        )
        return best_options(latency_s, energy_j, weights, self.session.objective, fastest_s)

    def _worth_it(self, table: _Table, optimistic: bool) -> tuple[Array, Array]:
        """Values of a task's pairs; those that are not to be measured are out of reach."""
        latency_s, energy_j = table.values(optimistic)
        left_out = np.append(self._same_as_default(), False) & ~table.measured
        if optimistic:
            near = np.append(self._near(table.complete[:-1]), False)
            left_out |= near & ~table.measured
        far = np.where(left_out, _NEVER, 1.0)
        return latency_s * far, energy_j * far

    def _same_as_default(self) -> Marks:
        """Clocks that the driver does not exceed by itself; locking them changes nothing."""
        observed = [
            kernel.measured.clock_mhz
            for finals in self._finals.values()
            for kernel in finals.values()
            if kernel.measured is not None
        ]
        known = [clock for clock in observed if clock is not None]
        reached = max(known) if len(known) == len(observed) else np.inf
        return np.asarray([clock >= reached for clock in self.clock_mhz], dtype=bool)

    def _near(self, measured: Marks) -> Marks:
        """Clocks next to a measured one, or measured themselves."""
        f = self.clock_mhz
        reach = _NEAR_STEPS * float(np.median(np.diff(f)))
        return np.asarray((np.abs(f[:, None] - f[measured]) <= reach).any(axis=1))

    def _widest_gap(self, measured: Marks) -> float | None:
        """The unmeasured clock farthest from a measured one, in the upper half of the range."""
        f = self.clock_mhz
        at = np.append(f[measured], f[-1])
        distance = np.abs(f[:, None] - at).min(axis=1)
        distance[measured | (f < _LOWEST_SHARE * f[-1])] = -1.0
        widest = int(np.argmax(distance))
        return float(f[widest]) if distance[widest] > 0 else None

    # -- fits ------------------------------------------------------------------------------------

    def _tables(self) -> dict[str, _Table]:
        """Measured values, and fits where nothing was measured.

        Raises:
            ConfigurationError: the points do not support a fit.
        """
        kernels = [(w, kernel) for w, finals in self._finals.items() for kernel in finals.values()]
        studies = study(
            [self._series(workload, kernel) for workload, kernel in kernels],
            clock_mhz=self.clock_mhz,
            power_limit_w=self._power_limit_w,
        )
        rows: dict[str, list[tuple[Array, ...]]] = {}
        for (workload, kernel), one in zip(kernels, studies, strict=True):
            assert one.power is not None
            f = self.clock_mhz
            t, p = one.latency.through_points(f), one.power.through_points(f)
            low_t = np.maximum(t - one.latency.half_width(f), _OPTIMISM * t)
            low_p = np.maximum(p - one.power.half_width(f), _OPTIMISM * p)
            rows.setdefault(workload, []).append(self._row(workload, kernel, t, p, low_t, low_p))
        return {
            workload: _Table(*(np.array(column) for column in zip(*each, strict=True)))
            for workload, each in rows.items()
        }

    def _row(
        self, workload: str, kernel: Kernel, t: Array, p: Array, low_t: Array, low_p: Array
    ) -> tuple[Array, ...]:
        columns = [t.copy(), t * p, low_t, low_t * low_p, np.zeros(len(t), bool)]
        for (key, clock), point in self.session.points(workload).items():
            at = np.flatnonzero(self.clock_mhz == clock)
            if key == kernel.key and len(at):
                self._put(columns, int(at[0]), point.measured.latency_s, point.measured.energy_j)
        for w, key, clock in self._failed:
            if (w, key) == (workload, kernel.key):
                column = int(np.flatnonzero(self.clock_mhz == clock)[0])
                far_s = _NEVER * float(t[column])
                self._put(columns, column, far_s, far_s * float(p[column]))
        columns = [np.append(column, np.zeros(1, column.dtype)) for column in columns]
        assert kernel.measured is not None
        self._put(columns, -1, kernel.measured.latency_s, kernel.measured.energy_j)
        return tuple(columns)

    @staticmethod
    def _put(columns: list[Array], at: int, latency_s: float, energy_j: float) -> None:
        values = (latency_s, energy_j, latency_s, energy_j, True)
        for column, value in zip(columns, values, strict=True):
            column[at] = value

    def _series(self, workload: str, kernel: Kernel) -> Series:
        """A finalist's points; the default clock counts as the highest requested."""
        assert kernel.measured is not None
        points = {float(self.clock_mhz[-1]): kernel.measured}
        points |= {
            clock: point.measured
            for (key, clock), point in self.session.points(workload).items()
            if key == kernel.key
        }
        clocks = sorted(points)
        results = [points[clock] for clock in clocks]
        return Series(
            name=kernel.key,
            clock_mhz=np.array(clocks),
            effective_mhz=np.array(
                [
                    clock if one.clock_mhz is None else min(one.clock_mhz, clock)
                    for clock, one in zip(clocks, results, strict=True)
                ]
            ),
            latency_s=np.array([one.latency_s for one in results]),
            power_w=np.array([one.power_w for one in results]),
            repeats=np.ones(len(results)),
            power_noise=float(np.median([one.relative_stderr for one in results])),
        )
