r"""Several devices share a bandwidth B: which part each gets, together with its split, clock and power.

    minimise sum_n E_n(option_n, b_n)   subject to   sum_n b_n <= B

(frequency division; every device has its deadline, its channel and its own share of the server). With
budget t, d bits and s = h / N0, one option costs

    E(b) = e + (t b / s) (2^(d / (b t)) - 1),   b >= b_min (the highest power),

convex and falling in b. The choice of options makes the whole problem combinatorial (a knapsack).

Method (ours):
1. *Price.* At a price mu for one hertz each device minimises E + mu b by itself. With
   x = d ln 2 / (b t), the best b solves (x - 1) e^x = mu s / t - 1, that is
   x = 1 + W0((mu s / t - 1) / e), W the Lambert function. Bisection finds the lowest price at which all
   shares fit. Every price gives a lower bound (Lagrangian duality), and the bound's distance from
   the optimum is at most about one device's worth (Shapley-Folkman), so little for many devices.
2. *Repair.* Options are fixed, and the bandwidth is divided anew, exactly (the same equation, price by
   bisection). Devices whose option differs just below the price are moved to it while that helps.
3. *Exchange.* For few devices, each option of each device, and of each pair, is tried in
   turn, until nothing improves.
The result names its lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_energy.dvfs.channel import RadioChannel
from tvm_energy.dvfs.partition import (
    Options,
    PartitionTask,
    Split,
    options,
    split_of,
)
from tvm_energy.errors import ConfigurationError, DeadlineImpossible

__all__ = ["SharedPlan", "share_bandwidth"]

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

_PRICE_STEPS = 60
#: Exchanges are tried where one round of them is at most this many divisions of the bandwidth.
_EXCHANGES = 2_000
_LOG2 = math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """What all devices do.

    Attributes:
        splits: one for each device, in the order given.
        energy_j: of all devices.
        lower_bound_j: no plan can need less.
    """

    splits: tuple[Split, ...]
    energy_j: float
    lower_bound_j: float

    @property
    def gap(self) -> float:
        """Energy above the lower bound, as a share of it; at most this much could be saved."""
        return max(0.0, self.energy_j / self.lower_bound_j - 1) if self.lower_bound_j > 0 else 0.0


def share_bandwidth(tasks: Sequence[PartitionTask], bandwidth_hz: float) -> SharedPlan:
    """Divide a bandwidth among devices for the least energy of all, each within its deadline.

    Args:
        tasks: devices with a `RadioChannel`; its own ``bandwidth_hz`` is not used.
        bandwidth_hz: B.

    Raises:
        ConfigurationError: no device, a channel of fixed rate, or a bandwidth below zero.
        DeadlineImpossible: the deadlines cannot all be met; it names by which factor they would have to
            be stretched.
    """
    if not tasks:
        raise ConfigurationError("there is no device; give at least one")
    if not (math.isfinite(bandwidth_hz) and bandwidth_hz >= 0):
        raise ConfigurationError(f"the bandwidth must be 0 Hz or more, got {bandwidth_hz}")
    problem = _problem(tasks)
    if not problem.fits(bandwidth_hz):
        raise _impossible(tasks, bandwidth_hz)
    chosen, bound = _by_price(problem, bandwidth_hz)
    chosen = _exchange(problem, chosen, bandwidth_hz)
    shares = problem.divide(chosen, bandwidth_hz)
    energy = problem.energy(chosen, shares)
    splits = []
    for task, choices, index, share in zip(
        tasks, problem.choices, problem.original[chosen], shares, strict=True
    ):
        budget = float(choices.budget_s[index])
        power = _power(task.channel, float(choices.bits[index]), budget, float(share))
        splits.append(
            split_of(
                task,
                choices,
                int(index),
                power_w=power,
                sending_s=budget,
                bandwidth_hz=float(share),
            )
        )
    total = float(energy.sum())
    return SharedPlan(splits=tuple(splits), energy_j=total, lower_bound_j=min(bound, total))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Useful options of all devices in flat arrays; those of device n from start[n] to start[n + 1].

    ``strength`` is h / N0 of the device, ``least`` the smallest bandwidth that will do.
    """

    choices: tuple[Options, ...]
    start: Integers
    device: Integers
    original: Integers
    base_j: Floats
    budget_s: Floats
    bits: Floats
    strength: Floats
    least: Floats

    def fits(self, bandwidth_hz: float) -> bool:
        """Whether all deadlines can be met at all."""
        if np.any(np.diff(self.start) == 0):
            return False
        least = np.minimum.reduceat(self.least, self.start[:-1])
        return float(least.sum()) <= bandwidth_hz * (1 + 1e-12)

    def share(self, index: Integers | slice, price: float) -> Floats:
        """The best bandwidth of options at a price for one hertz."""
        from scipy.special import lambertw

        bits, budget = self.bits[index], self.budget_s[index]
        shares = np.zeros(len(bits))
        sends = bits > 0
        budget, strength = budget[sends], self.strength[index][sends]
        argument = np.maximum((price * strength / budget - 1) / math.e, -1 / math.e)
        x = 1 + lambertw(argument).real
        with np.errstate(divide="ignore"):
            wanted = bits[sends] * _LOG2 / (np.maximum(x, 1e-300) * budget)
        shares[sends] = np.maximum(wanted, self.least[index][sends])
        return shares

    def energy(self, index: Integers | slice, shares: Floats) -> Floats:
        """Device energy of options with these bandwidths."""
        energy: Floats = self.base_j[index].copy()
        bits, budget = self.bits[index], self.budget_s[index]
        sends = bits > 0
        b, t = shares[sends], budget[sends]
        with np.errstate(over="ignore"):
            sent = t * b / self.strength[index][sends] * np.expm1(bits[sends] * _LOG2 / (b * t))
        energy[sends] += sent
        return energy

    def divide(self, chosen: Integers, bandwidth_hz: float) -> Floats:
        """Bandwidths of least energy for fixed options; they must fit."""
        sends = chosen[self.bits[chosen] > 0]
        shares = np.zeros(len(chosen))
        if not len(sends):
            return shares
        least = self.least[sends]
        if least.sum() >= bandwidth_hz:
            shares[self.bits[chosen] > 0] = least * min(1.0, bandwidth_hz / least.sum())
            return shares
        low, high = _bracket(lambda price: float(self.share(sends, price).sum()), bandwidth_hz)
        for _ in range(_PRICE_STEPS):
            middle = math.sqrt(low * high)
            if self.share(sends, middle).sum() > bandwidth_hz:
                low = middle
            else:
                high = middle
        found = self.share(sends, high)
        # What bisection left over: more never hurts.
        shares[self.bits[chosen] > 0] = found * (bandwidth_hz / found.sum())
        return shares

    def total(self, chosen: Integers, bandwidth_hz: float) -> float:
        """Least energy with these options; infinite when they do not fit."""
        if self.least[chosen].sum() > bandwidth_hz * (1 + 1e-12):
            return math.inf
        return float(self.energy(chosen, self.divide(chosen, bandwidth_hz)).sum())


def _bracket(demand: Callable[[float], float], bandwidth_hz: float) -> tuple[float, float]:
    """Prices at which more, and at most, the bandwidth is wanted."""
    low = high = 1e-9
    while demand(high) > bandwidth_hz and high < 1e60:
        low, high = high, high * 1e3
    while demand(low) <= bandwidth_hz and low > 1e-60:
        low, high = low / 1e3, low
    return low, high


def _problem(tasks: Sequence[PartitionTask]) -> _Problem:
    everything = tuple(options(task) for task in tasks)
    parts: list[list[NDArray[np.generic]]] = []
    counts = []
    for number, (task, choices) in enumerate(zip(tasks, everything, strict=True)):
        channel = _radio(task)
        least = _least_bandwidth(
            choices.bits,
            choices.budget_s,
            np.full(len(choices.bits), channel.strength_hz),
            np.full(len(choices.bits), task.deadline_s),
        )
        kept = _useful(choices, least)
        counts.append(len(kept))
        strength = channel.gain / channel.noise_w_per_hz
        parts.append(
            [
                np.full(len(kept), number),
                kept,
                choices.energy_j[kept],
                choices.budget_s[kept],
                choices.bits[kept],
                np.full(len(kept), strength),
                least[kept],
            ]
        )
    start = np.concatenate([[0], np.cumsum(counts)])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return _Problem(everything, start, *columns)


def _least_bandwidth(
    bits: Floats, budget_s: Floats, strength_hz: Floats, deadline_s: Floats
) -> Floats:
    """B with b log2(1 + s / b) = d / t; 0 where nothing is sent, infinite where impossible.

    With z = s / b: ln(1 + z) = k z, k = d ln 2 / (s t), so z = -W_{-1}(-k e^-k) / k - 1; solvable for
    k < 1.
    """
    from scipy.special import lambertw

    least = np.where((bits == 0) & (budget_s >= -1e-12 * deadline_s), 0.0, np.inf)
    sends = np.flatnonzero((bits > 0) & (budget_s > 0) & (strength_hz > 0))
    k = bits[sends] * _LOG2 / (strength_hz[sends] * budget_s[sends])
    sends, k = sends[k < 1], k[k < 1]
    z = -lambertw(-k * np.exp(-k), -1).real / k - 1
    with np.errstate(divide="ignore"):
        least[sends] = strength_hz[sends] / np.maximum(z, 0.0)
    return least


def _useful(choices: Options, least: Floats) -> Integers:
    """Options that fit some bandwidth and are not beaten in energy, time left and bits at once."""
    kept: list[int] = []
    order = np.lexsort((choices.bits, -choices.budget_s, choices.energy_j))
    for index in order:
        if not np.isfinite(least[index]):
            continue
        before = np.array(kept, np.intp)
        local = choices.bits[index] == 0
        # Where nothing is sent, time that is left is worth nothing.
        beaten = (choices.bits[before] <= choices.bits[index]) & (
            local & (choices.bits[before] == 0)
            | (choices.budget_s[before] >= choices.budget_s[index])
        )
        if not beaten.any():
            kept.append(int(index))
    return np.array(kept, np.intp)


def _by_price(problem: _Problem, bandwidth_hz: float) -> tuple[Integers, float]:
    """Options at the lowest price at which all shares fit, repaired; and the best lower bound."""
    everything = slice(None)
    bound = -math.inf

    def choose(price: float) -> tuple[Integers, float]:
        nonlocal bound
        shares = problem.share(everything, price)
        cost = problem.energy(everything, shares) + price * shares
        least = np.minimum.reduceat(cost, problem.start[:-1])
        bound = max(bound, float(least.sum()) - price * bandwidth_hz)
        # The first of each device that reaches its least cost.
        winners = np.flatnonzero(cost == least[problem.device])
        _, first = np.unique(problem.device[winners], return_index=True)
        chosen = winners[first]
        return chosen, float(shares[chosen].sum())

    free = _cheapest_without_sending(problem)
    if free is not None:
        return free, float(problem.base_j[free].sum())
    low, high = _bracket(lambda price: choose(price)[1], bandwidth_hz)
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if choose(middle)[1] > bandwidth_hz:
            low = middle
        else:
            high = middle
    chosen, wanted = choose(high)
    if wanted > bandwidth_hz:
        chosen = _narrowest(problem)
    other, _ = choose(low)
    best = problem.total(chosen, bandwidth_hz)
    for device in np.flatnonzero(other != chosen):
        trial = chosen.copy()
        trial[device] = other[device]
        total = problem.total(trial, bandwidth_hz)
        if total < best:
            chosen, best = trial, total
    return chosen, bound


def _cheapest_without_sending(problem: _Problem) -> Integers | None:
    """The cheapest option of each device, when none of these sends anything."""
    least = np.minimum.reduceat(problem.base_j, problem.start[:-1])
    winners = np.flatnonzero((problem.base_j == least[problem.device]) & (problem.bits == 0))
    devices, first = np.unique(problem.device[winners], return_index=True)
    return winners[first] if len(devices) == len(problem.choices) else None


def _narrowest(problem: _Problem) -> Integers:
    """The options that need the least bandwidth."""
    least = np.minimum.reduceat(problem.least, problem.start[:-1])
    winners = np.flatnonzero(problem.least == least[problem.device])
    _, first = np.unique(problem.device[winners], return_index=True)
    return winners[first]


def _exchange(problem: _Problem, chosen: Integers, bandwidth_hz: float) -> Integers:
    """Try other options of one device, and of two, as long as that helps and few enough exist."""
    counts = np.diff(problem.start)
    alternatives = [range(a, b) for a, b in itertools.pairwise(problem.start.tolist())]
    devices = range(len(counts))
    moves: list[tuple[int, ...]] = [(d,) for d in devices] if counts.sum() <= _EXCHANGES else []
    # All pairs together: ((sum c)^2 - sum c^2) / 2 combinations.
    if int(counts.sum()) ** 2 - int((counts**2).sum()) <= 2 * _EXCHANGES:
        moves = [*moves, *itertools.combinations(devices, 2)]
    best = problem.total(chosen, bandwidth_hz)
    improved = bool(moves)
    while improved:
        improved = False
        for move in moves:
            for indices in itertools.product(*(alternatives[device] for device in move)):
                trial = chosen.copy()
                trial[list(move)] = indices
                total = problem.total(trial, bandwidth_hz)
                if total < best * (1 - 1e-12):
                    chosen, best, improved = trial, total, True
    return chosen


def _power(channel: object, bits: float, budget_s: float, share_hz: float) -> float:
    """Power that sends the bits in time through a share of the bandwidth."""
    if bits == 0 or not isinstance(channel, RadioChannel):
        return 0.0
    noise = channel.noise_w_per_hz * share_hz / channel.gain
    return min(channel.max_power_w, noise * math.expm1(bits * _LOG2 / (share_hz * budget_s)))


def _impossible(tasks: Sequence[PartitionTask], bandwidth_hz: float) -> DeadlineImpossible:
    """Find by bisection how much longer all deadlines would have to be."""
    everything = [options(task) for task in tasks]
    # For feasibility only the fastest clock of each split counts.
    fastest = [choices.take(_fastest(choices)) for choices in everything]
    used = np.concatenate([choices.local_s + choices.server_s for choices in fastest])
    bits = np.concatenate([choices.bits for choices in fastest])
    counts = [len(choices.bits) for choices in fastest]
    start = np.concatenate([[0], np.cumsum(counts)[:-1]])
    deadline = np.repeat([task.deadline_s for task in tasks], counts)
    strength = np.repeat([_radio(task).strength_hz for task in tasks], counts)

    def fits(factor: float) -> bool:
        least = _least_bandwidth(bits, factor * deadline - used, strength, factor * deadline)
        return float(np.minimum.reduceat(least, start).sum()) <= bandwidth_hz

    low, high = 1.0, 2.0
    while not fits(high) and high < 1e9:
        low, high = high, high * 2
    if high >= 1e9:
        return DeadlineImpossible("no deadline at all could be met by every device", math.inf)
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return DeadlineImpossible(
        f"{len(tasks)} devices cannot all meet their deadlines with {bandwidth_hz:.6g} Hz; "
        f"they could with all deadlines {high:.6g} times as long",
        max(task.deadline_s for task in tasks) * high,
    )


def _fastest(choices: Options) -> Integers:
    """The clock that is fastest on the device, for each split."""
    order = np.lexsort((choices.local_s, choices.split))
    _, first = np.unique(choices.split[order], return_index=True)
    return order[first]


def _radio(task: PartitionTask) -> RadioChannel:
    if not isinstance(task.channel, RadioChannel):
        raise ConfigurationError(
            f"{task.name}: a link of fixed rate has no bandwidth to share; plan this device by "
            "itself, or give gain, noise and power"
        )
    return task.channel
