"""One clock per block, with a cost of switching: cheapest paths and exact search under a deadline.

A path chooses one clock for each block. Its time is the sum of the blocks' latencies plus ``switch_s``
for each change of clock between neighbouring blocks; its energy likewise. For a price w of one second,
the path of least E + w T is found by dynamic programming over (block, clock). All such paths are the
corners of the lower convex hull of what is possible.

Least E with T <= D is a multiple-choice knapsack. The dual (the price at which the hull crosses D) gives
a lower bound on every unfinished path; mixtures of the hull's corners next to D are a good path to begin
with (ours); a label-setting search (labels: time and energy so far) drops labels
that are dominated or whose bound does not beat the best path known (Kellerer, Pferschy, Pisinger,
Knapsack Problems, 2004, chapter 11, for the method without switching).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Path", "Trellis"]

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]

#: Relative slack that rounding of sums may take.
_ROUNDING = 1e-12
#: Corners of the hull, on each side of the limit, that are tried in mixtures, and how often what comes of it is
#: mixed again.
_CROSSED, _CROSSINGS = 3, 4
#: Labels kept for one block, widened until nothing that could win was dropped.
_WIDTHS = (256, 20_000)


@dataclass(frozen=True, slots=True)
class Path:
    """One clock index per block, with its total time and energy."""

    choice: tuple[int, ...]
    latency_s: float
    energy_j: float


class Trellis:
    """Paths through blocks x clocks.

    Args:
        latency_s, energy_j: (blocks, clocks), not negative.
        switch_s, switch_j: what one change of clock costs.
    """

    def __init__(
        self, latency_s: Floats, energy_j: Floats, switch_s: float = 0.0, switch_j: float = 0.0
    ) -> None:
        self.latency_s, self.energy_j = latency_s, energy_j
        self.switch_s, self.switch_j = switch_s, switch_j

    def evaluate(self, choice: Integers) -> Path:
        """The path of these clock indices."""
        rows = np.arange(len(choice))
        switches = int(np.count_nonzero(np.diff(choice)))
        return Path(
            tuple(map(int, choice)),
            float(self.latency_s[rows, choice].sum()) + switches * self.switch_s,
            float(self.energy_j[rows, choice].sum()) + switches * self.switch_j,
        )

    def cheapest(self, energy_weight: float, time_weight: float) -> Path:
        """The path of least ``energy_weight E + time_weight T``."""
        cost = energy_weight * self.energy_j + time_weight * self.latency_s
        switch = energy_weight * self.switch_j + time_weight * self.switch_s
        if switch == 0:
            return self.evaluate(cost.argmin(axis=1))
        to_go, following = _cost_to_go(cost, switch)
        choice = np.empty(len(cost), np.intp)
        choice[0] = (cost[0] + to_go[0]).argmin()
        for block in range(1, len(cost)):
            choice[block] = following[block - 1, choice[block - 1]]
        return self.evaluate(choice)

    def hull(self, value: Callable[[float, float], float] | None = None) -> Iterator[Path]:
        """Corners of the lower convex hull of (T, E), coarse ones first.

        Args:
            value: a function of (latency, energy), increasing in both, whose least value over a
                polygon lies at a corner (quasi-concave, such as E T^k). Then only
                corners that may beat all earlier ones are visited, and the best is among them.
        """
        fast, frugal = self.cheapest(0, 1), self.cheapest(1, 0)
        yield from (fast, frugal)
        best = min(value(p.latency_s, p.energy_j) for p in (fast, frugal)) if value else 0.0
        order = itertools.count()
        pending = [(-np.inf, next(order), fast, np.inf, frugal, 0.0)]
        while pending:
            bound, _, left, left_price, right, right_price = heapq.heappop(pending)
            if value and bound >= best:
                return
            gain, wait = left.energy_j - right.energy_j, right.latency_s - left.latency_s
            if gain <= 0 or wait <= 0:
                continue
            price = gain / wait
            found = self.cheapest(1, price)
            level = left.energy_j + price * left.latency_s
            if found.energy_j + price * found.latency_s >= level * (1 - _ROUNDING):
                continue
            yield found
            if value:
                best = min(best, value(found.latency_s, found.energy_j))
            for a, a_price, b, b_price in (
                (left, left_price, found, price),
                (found, price, right, right_price),
            ):
                t, e = _meeting_point(a, a_price, b, b_price)
                if value:
                    key = min(value(t, e), *(value(p.latency_s, p.energy_j) for p in (a, b)))
                else:
                    key = -abs(
                        (b.latency_s - a.latency_s) * (e - a.energy_j)
                        - (t - a.latency_s) * (b.energy_j - a.energy_j)
                    )
                heapq.heappush(pending, (key, next(order), a, a_price, b, b_price))

    def within(self, deadline_s: float, tolerance: float) -> tuple[Path, float] | None:
        """Least energy with T <= deadline, and a proven lower bound of that energy.

        Returns None when even the fastest path is too slow. The energy is at most ``tolerance``
        (relative) above the bound, unless more than the widest number of labels would have been
        needed.
        """
        limit = deadline_s * (1 + _ROUNDING)
        inside, outside = self.cheapest(0, 1), self.cheapest(1, 0)
        if inside.latency_s > limit:
            return None
        if outside.latency_s <= limit:
            return outside, outside.energy_j
        price, bound = 0.0, outside.energy_j
        insides, outsides = [inside], [outside]
        while inside.energy_j > outside.energy_j:
            price = (inside.energy_j - outside.energy_j) / (outside.latency_s - inside.latency_s)
            found = self.cheapest(1, price)
            level = found.energy_j + price * found.latency_s
            bound = max(bound, level - price * limit)
            if level >= (inside.energy_j + price * inside.latency_s) * (1 - _ROUNDING):
                break
            if found.latency_s <= limit:
                inside = found
                insides.append(found)
            else:
                outside = found
                outsides.append(found)
        best = self._crossed(inside, insides[-_CROSSED:] + outsides[-_CROSSED:], limit)
        for width in _WIDTHS:
            if best.energy_j * (1 - tolerance) <= bound:
                break
            found_path, dropped = self._search(limit, price, best.energy_j, tolerance, width)
            best = found_path or best
            # Whatever was not dropped for lack of room costs at least this much.
            bound = max(bound, min(dropped, best.energy_j * (1 - tolerance)))
        return best, min(bound, best.energy_j)

    def _crossed(self, inside: Path, corners: Sequence[Path], limit: float) -> Path:
        """The best path within the limit that follows one of these and in between another one.

        Corners next to the limit cost the same at its price, and so does a mixture of two, but for what it
        takes to change between them. A good path to begin with spares the search most labels.
        """
        best = inside
        pairs = list(itertools.permutations(corners, 2))
        for _ in range(_CROSSINGS):
            mixtures = [self._crossing(one, other, limit) for one, other in pairs]
            found = min(mixtures, key=lambda path: path.energy_j)
            if found.energy_j >= best.energy_j:
                break
            # What was found is mixed with the others once more.
            best = found
            pairs = [(best, corner) for corner in corners]
            pairs += [(corner, best) for corner in corners]
        return best

    def _crossing(self, one: Path, other: Path, limit: float) -> Path:
        """Follows ``one``, from some block to some later one ``other``.

        Time and energy of all windows [i, j) come from prefix sums over blocks and over boundaries.
        """
        a, b = np.array(one.choice), np.array(other.choice)
        rows = np.arange(len(a))
        # Changes of clock at the boundary before each block, along a, along b, from a to b, from b to a.
        along_a, along_b, enter, leave = (
            np.concatenate([[0], left[:-1] != right[1:], [0]]).astype(float)
            for left, right in ((a, a), (b, b), (a, b), (b, a))
        )
        inner = np.concatenate([[0], np.cumsum(along_b - along_a)])
        i, j = np.ogrid[: len(a) + 1, : len(a) + 1]
        changes = inner[j] - inner[np.minimum(i + 1, len(a) + 1)]
        changes = changes + (enter - along_a)[i] + (leave - along_a)[j]
        totals = []
        for table, switch, start in (
            (self.latency_s, self.switch_s, one.latency_s),
            (self.energy_j, self.switch_j, one.energy_j),
        ):
            sums = np.concatenate([[0], np.cumsum(table[rows, b] - table[rows, a])])
            totals.append(start + sums[j] - sums[i] + switch * changes)
        energy = np.where((j > i) & (totals[0] <= limit), totals[1], np.inf)
        first, end = divmod(int(energy.argmin()), len(a) + 1)
        mixed = a.copy()
        mixed[first:end] = b[first:end]
        path = self.evaluate(mixed)
        # Where no window fits, this is not within the limit either.
        return path if path.latency_s <= limit else Path((), np.inf, np.inf)

    def _search(
        self, limit: float, price: float, best: float, tolerance: float, width: int
    ) -> tuple[Path | None, float]:
        """Label-setting search; the path found, and the least bound among labels that had no room."""
        cost = self.energy_j + price * self.latency_s
        switch = self.switch_j + price * self.switch_s
        to_go, _ = _cost_to_go(cost, switch)
        so_far = _cost_to_go(cost[::-1], switch)[0][::-1]
        time_to_go, _ = _cost_to_go(self.latency_s, self.switch_s)
        ceiling = best * (1 - tolerance) + price * limit
        # Bounds and labels add the same numbers in different orders.
        slack = _ROUNDING * (abs(ceiling) + best)
        open_ = so_far + cost + to_go <= ceiling + slack
        time, energy = np.zeros(1), np.zeros(1)
        clock = np.full(1, -1)
        parents: list[Integers] = []
        clocks: list[Integers] = []
        dropped = np.inf
        for block in range(len(cost)):
            options = np.flatnonzero(open_[block])
            change = (clock[:, None] != options) & (clock[:, None] >= 0)
            t = time[:, None] + self.latency_s[block, options] + self.switch_s * change
            e = energy[:, None] + self.energy_j[block, options] + self.switch_j * change
            bound = e + price * t + to_go[block, options]
            keep = (bound <= ceiling + slack) & (t + time_to_go[block, options] <= limit)
            parent, option = np.nonzero(keep)
            if not len(parent):
                return None, dropped
            time, energy, bound = t[keep], e[keep], bound[keep]
            clock = options[option]
            kept = _undominated(time, energy, clock if switch else np.zeros_like(clock))
            if len(kept) > width:
                kept = kept[np.argsort(bound[kept], kind="stable")]
                dropped = min(dropped, float(bound[kept[width]]) - price * limit)
                kept = kept[:width]
            time, energy, clock = time[kept], energy[kept], clock[kept]
            parents.append(parent[kept])
            clocks.append(clock)
        label = int(energy.argmin())
        if energy[label] >= best:
            return None, dropped
        choice = np.empty(len(cost), np.intp)
        for block in range(len(cost) - 1, -1, -1):
            choice[block] = clocks[block][label]
            label = int(parents[block][label])
        return self.evaluate(choice), dropped


def _cost_to_go(cost: Floats, switch: float) -> tuple[Floats, Integers]:
    """Least cost of all later blocks for each (block, clock), and the clock that follows."""
    blocks, clocks = cost.shape
    to_go, following = np.zeros(cost.shape), np.zeros(cost.shape, np.intp)
    own = np.arange(clocks)
    for block in range(blocks - 2, -1, -1):
        later = cost[block + 1] + to_go[block + 1]
        other = int(later.argmin())
        moved = later[other] + switch
        stay = later <= moved
        to_go[block] = np.where(stay, later, moved)
        following[block] = np.where(stay, own, other)
    return to_go, following


def _undominated(time: Floats, energy: Floats, group: Integers) -> Integers:
    """Labels for which no other of the same group needs as little time and as little energy."""
    order = np.lexsort((energy, time, group))
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(energy[order], kind="stable")] = np.arange(len(order))
    # Later groups get lower keys, so that one running minimum serves them all.
    key = rank - group[order].astype(np.int64) * len(order)
    before = np.minimum.accumulate(key)
    first = np.ones(len(order), bool)
    first[1:] = key[1:] < before[:-1]
    return order[first]


def _meeting_point(a: Path, a_price: float, b: Path, b_price: float) -> tuple[float, float]:
    """Where the supporting lines of two neighbouring corners meet: no path between lies below."""
    if np.isinf(a_price):
        t = a.latency_s
    else:
        a_level = a.energy_j + a_price * a.latency_s
        b_level = b.energy_j + b_price * b.latency_s
        t = (a_level - b_level) / (a_price - b_price)
    return t, b.energy_j + b_price * (b.latency_s - t)
