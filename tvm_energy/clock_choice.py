"""Which kernel at which clock: the choice among the pairs that were measured.

A *pair* is a kernel and the clock that was locked while it was measured; with the clock that the driver takes
(the default), the finalists' own measurements are pairs, too. The objective is applied to the network: sums of
latency and energy over its tasks, each counted ``weight`` times, and the slack is one on the sum of the
latencies of the fastest kernels at the default clock::

    minimise  cost(sum w_i T_i, sum w_i E_i, sum w_i T_fastest,i)   over the pairs of each task i

``one``         all tasks run at the same clock, since a change of clock takes longer than most kernels
``per-kernel``  each task has a clock of its own; what a change costs is not counted
``default``     the clock is left to the driver (`tvm_energy.ranking.choose`)

No fit decides here: a replay of the log gives the same choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tvm_energy.dvfs.trellis import Trellis
from tvm_energy.errors import ConfigurationError
from tvm_energy.objective import Objective, SlowdownBound
from tvm_energy.ranking import TIE_SIGMA, Choice, Kernel, choose, eligible
from tvm_energy.records import ClockRecord, Header, Record

Floats = npt.NDArray[np.float64]

DEFAULT, ONE, PER_KERNEL = "default", "one", "per-kernel"
MODES = (DEFAULT, ONE, PER_KERNEL)

#: Of tied choices the one at the default clock is taken unless it is slower than another by this share: a lock
#: that gains nothing is one thing more that can go wrong.
_NO_LOCK = 0.005

#: Energy of a network is within this of the least possible; what is measured is less certain.
_TOLERANCE = 1e-5

Points = dict[tuple[str, float], ClockRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKernels:
    """What is known of one task.

    Attributes:
        kernels: at the default clock, by key.
        points: at locked clocks, by key and clock.
        weight: how often the network calls it.
    """

    kernels: Mapping[str, Kernel]
    points: Mapping[tuple[str, float], ClockRecord] = field(default_factory=dict)
    weight: float = 1.0


def check_mode(mode: str) -> str:
    """The mode itself.

    Raises:
        ConfigurationError: there is no such mode.
    """
    if mode not in MODES:
        raise ConfigurationError(f"unknown choice of clocks {mode!r}; there are {', '.join(MODES)}")
    return mode


def mode_of(header: Header) -> str:
    """How the run of a header chose clocks."""
    clocks = header.clocks or {}
    if not clocks.get("finalists"):
        return DEFAULT
    return PER_KERNEL if clocks.get("per_kernel") else ONE


def points_by_workload(records: Iterable[Record]) -> dict[str, Points]:
    """Measurements at locked clocks by workload, key and clock; the last one of a pair counts."""
    points: dict[str, Points] = {}
    for record in records:
        if isinstance(record, ClockRecord):
            points.setdefault(record.workload, {})[record.key, record.clock_mhz] = record
    return points


def choose_all(
    tasks: Mapping[str, TaskKernels], objective: Objective, mode: str = ONE
) -> dict[str, Choice]:
    """Fastest and chosen kernel of each task, with the chosen one's clock.

    A task without any measurement at a locked clock keeps its choice at the default clock. Where two
    choices lie within `TIE_SIGMA` standard errors, the faster one is taken, as everywhere, or the one at the
    default clock where that is as fast; but only among measurements with long windows: a short one that leads
    is to be confirmed, not passed over.

    Args:
        tasks: by workload.
        objective: ranks.
        mode: see the module's text.

    Returns:
        By workload; tasks in which nothing can win are left out.
    """
    found = {workload: choose(task.kernels.values(), objective) for workload, task in tasks.items()}
    choices = {workload: choice for workload, choice in found.items() if choice is not None}
    if mode == DEFAULT or not objective.needs_energy:
        return choices
    pairs = {workload: _pairs(tasks[workload], objective) for workload in choices}
    joint = [w for w, each in pairs.items() if any(pair.clock_mhz is not None for pair in each)]
    if not joint:
        return choices
    network = _Network(
        pairs=[pairs[workload] for workload in joint],
        weights=[tasks[workload].weight for workload in joint],
        fastest=[choices[workload].fastest for workload in joint],
        objective=objective,
    )
    chosen = network.one() if mode == ONE else network.per_kernel()
    for workload, (best, ties) in zip(joint, chosen, strict=True):
        choices[workload] = dataclasses.replace(
            choices[workload], best=best, ties=ties, at_default=choices[workload].best
        )
    return choices


def _pairs(task: TaskKernels, objective: Objective) -> list[Kernel]:
    """All pairs that may win, those at the default clock first."""
    pool = eligible(task.kernels.values(), objective)
    keys = {kernel.key for kernel in pool}
    return pool + [
        Kernel(
            key=key,
            latency_s=point.measured.latency_s,
            measured=point.measured,
            final=point.confirmed,
            clock_mhz=clock_mhz,
        )
        for (key, clock_mhz), point in task.points.items()
        if key in keys
    ]


#: A pair, and those as good within the error.
_Chosen = tuple[Kernel, tuple[Kernel, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """Tasks in one order: their pairs, weights, and fastest kernels at the default clock."""

    pairs: list[list[Kernel]]
    weights: list[float]
    fastest: list[Kernel]
    objective: Objective

    @property
    def fastest_s(self) -> float:
        return math.fsum(w * k.latency_s for w, k in zip(self.weights, self.fastest, strict=True))

    def one(self) -> list[_Chosen]:
        clocks = {pair.clock_mhz for pairs in self.pairs for pair in pairs}
        ranked = []
        for clock in sorted(clocks, key=lambda mhz: -math.inf if mhz is None else mhz):
            options = [[p for p in pairs if p.clock_mhz == clock] for pairs in self.pairs]
            if all(options):
                ranked.append(self._best(options))
        costs = [self._cost(chosen) for chosen in ranked]
        lead = min(range(len(ranked)), key=lambda index: costs[index][0])
        tied = [
            chosen
            for chosen, (cost, error) in zip(ranked, costs, strict=True)
            if chosen is ranked[lead]
            or (
                _all_long(chosen, ranked[lead])
                and cost - costs[lead][0] <= TIE_SIGMA * math.hypot(error, costs[lead][1])
            )
        ]
        return min(tied, key=lambda chosen: self._latency_s(chosen) * _handicap(chosen[0][0]))

    def per_kernel(self) -> list[_Chosen]:
        return self._best(self.pairs)

    def _best(self, options: list[list[Kernel]]) -> list[_Chosen]:
        chosen, _ = best_options(
            [np.array([pair.latency_s for pair in each]) for each in options],
            [np.array([pair.energy_j for pair in each], dtype=float) for each in options],
            self.weights,
            self.objective,
            self.fastest_s,
        )
        return [_faster(each[index], each) for each, index in zip(options, chosen, strict=True)]

    def _latency_s(self, chosen: Sequence[_Chosen]) -> float:
        return math.fsum(
            w * best.latency_s for w, (best, _) in zip(self.weights, chosen, strict=True)
        )

    def _cost(self, chosen: Sequence[_Chosen]) -> tuple[float, float]:
        """Cost of the network and its standard error; infinite without error where not acceptable."""
        energy_j = variance = 0.0
        for weight, (best, _) in zip(self.weights, chosen, strict=True):
            assert best.measured is not None
            energy_j += weight * best.measured.energy_j
            variance += (weight * best.measured.stderr_j) ** 2
        latency_s = self._latency_s(chosen)
        cost, raised = (
            cost_of(self.objective, latency_s, energy, self.fastest_s)
            for energy in (energy_j, energy_j + math.sqrt(variance))
        )
        return cost, raised - cost if math.isfinite(cost) else 0.0


def cost_of(objective: Objective, latency_s: float, energy_j: float, fastest_s: float) -> float:
    """Cost of one network."""
    return float(objective.cost(np.array([latency_s]), np.array([energy_j]), fastest_s)[0])


def best_options(
    latency_s: Sequence[Floats],
    energy_j: Sequence[Floats],
    weights: Sequence[float],
    objective: Objective,
    fastest_s: float,
) -> tuple[tuple[int, ...], float]:
    """One option of each task so that the network costs least.

    Exact for one task. For several: within a bound on the slowdown to `_TOLERANCE` (label-setting search,
    `tvm_energy.dvfs.trellis`), else the best corner of the convex hull, which is the best of all for costs
    that rise in both and are quasi-concave, as those of the stock objectives are.

    Args:
        latency_s, energy_j: of each task's options, shape (n_i,).
        weights: of the tasks.
        objective: ranks networks.
        fastest_s: latency of the network with the fastest kernels at the default clock.

    Returns:
        Index of each task's option, and the cost; infinite where no choice is acceptable, and then the
        fastest one is returned.
    """
    if len(latency_s) == 1:
        times, energies = weights[0] * latency_s[0], weights[0] * energy_j[0]
        values = objective.cost(times, energies, fastest_s)
        best = int(np.argmin(values)) if np.isfinite(values).any() else int(np.argmin(times))
        return (best,), float(values[best])
    trellis = Trellis(_matrix(latency_s, weights), _matrix(energy_j, weights))
    paths = [trellis.cheapest(0, 1)]
    if isinstance(objective, SlowdownBound):
        found = trellis.within((1 + objective.slack) * fastest_s, _TOLERANCE)
        paths += [] if found is None else [found[0]]
    else:
        paths += trellis.hull()
    costs = [cost_of(objective, path.latency_s, path.energy_j, fastest_s) for path in paths]
    best = min(range(len(paths)), key=costs.__getitem__)
    # Shorter rows were filled up with their first option.
    indices = (
        index if index < len(options) else 0
        for index, options in zip(paths[best].choice, latency_s, strict=True)
    )
    return tuple(indices), costs[best]


def _matrix(rows: Sequence[Floats], weights: Sequence[float]) -> Floats:
    width = max(map(len, rows))
    return np.array(
        [
            weight * np.concatenate([row, np.full(width - len(row), row[0])])
            for row, weight in zip(rows, weights, strict=True)
        ]
    )


def _faster(best: Kernel, options: Sequence[Kernel]) -> _Chosen:
    """The fastest pair that costs no more energy within the error, and the others of these."""
    assert best.measured is not None
    tied = [
        pair
        for pair in options
        if pair is best
        or (
            pair.measured is not None
            and pair.final
            and best.final
            and pair.latency_s <= best.latency_s
            and pair.measured.energy_j - best.measured.energy_j
            <= TIE_SIGMA * math.hypot(pair.measured.stderr_j, best.measured.stderr_j)
        )
    ]
    fastest = min(tied, key=lambda pair: pair.latency_s * _handicap(pair))
    return fastest, tuple(pair for pair in tied if pair is not fastest)


def _all_long(*several: Sequence[_Chosen]) -> bool:
    return all(best.final for chosen in several for best, _ in chosen)


def _handicap(pair: Kernel) -> float:
    return 1.0 if pair.clock_mhz is not None else 1 - _NO_LOCK
