from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tvm_energy.dvfs.clock_table import ClockTable, clock_table
from tvm_energy.dvfs.plan import (
    ClockPlan,
    Deadline,
    EnergyDelay,
    Goal,
    PricedTime,
    Switching,
    front,
    plan,
)
from tvm_energy.errors import ConfigurationError, DeadlineImpossible


def random_table(seed: int, blocks: int, clocks: int, levels: int | None = None) -> ClockTable:
    """Any numbers at all: neither latency nor power is monotone in the clock."""
    rng = np.random.default_rng(seed)
    shape = (blocks, clocks)
    if levels:  # small integers: many ties
        latency, energy = rng.integers(1, levels + 1, shape), rng.integers(1, levels + 1, shape)
    else:
        latency, energy = rng.uniform(0.1, 2, shape), rng.uniform(0.1, 2, shape)
    return clock_table(np.arange(1, clocks + 1) * 100.0, latency, energy_j=energy)


def smooth_table(blocks: int, clocks: int) -> ClockTable:
    """As on a GPU: t = a / f + c, P = P0 + alpha f v(f)^2."""
    rng = np.random.default_rng(0)
    mhz = np.linspace(300, 1500, clocks)
    a, c = rng.uniform(0.1, 2, (2, blocks, 1))
    latency = 1e-3 * (a * 1500 / mhz + c)
    voltage = 1 + np.maximum(0, mhz - 900) / 2000
    return clock_table(
        mhz, latency, power_w=20 + rng.uniform(50, 150, (blocks, 1)) * mhz / 1500 * voltage**2
    )


def every_choice(
    table: ClockTable, switching: Switching, per_block: bool
) -> list[tuple[float, float]]:
    """(latency, energy) of all choices, by going through them."""
    blocks, clocks = table.latency_s.shape
    choices = (
        itertools.product(range(clocks), repeat=blocks)
        if per_block
        else ((index,) * blocks for index in range(clocks))
    )
    found = []
    for choice in choices:
        switches = sum(a != b for a, b in itertools.pairwise(choice))
        found.append(
            (
                sum(table.latency_s[b, c] for b, c in enumerate(choice))
                + switches * switching.seconds,
                sum(table.energy_j[b, c] for b, c in enumerate(choice))
                + switches * switching.joules,
            )
        )
    return found


def score(goal: Goal, latency_s: float, energy_j: float) -> float:
    if isinstance(goal, Deadline):
        return energy_j if latency_s <= goal.seconds * (1 + 1e-12) else math.inf
    if isinstance(goal, EnergyDelay):
        return energy_j * latency_s**goal.exponent
    return energy_j + goal.watts * latency_s


def recount(table: ClockTable, found: ClockPlan, switching: Switching) -> tuple[float, float]:
    """Latency and energy of a plan, from its clocks alone."""
    columns = [int(np.flatnonzero(table.clocks_mhz == clock)[0]) for clock in found.clocks_mhz]
    switches = sum(a != b for a, b in itertools.pairwise(columns))
    return (
        sum(table.latency_s[b, c] for b, c in enumerate(columns)) + switches * switching.seconds,
        sum(table.energy_j[b, c] for b, c in enumerate(columns)) + switches * switching.joules,
    )


goals = st.one_of(
    st.floats(0.0, 1.2).map(lambda part: ("deadline", part)),
    st.floats(0.3, 3).map(lambda exponent: ("edp", exponent)),
    st.floats(0, 5).map(lambda watts: ("price", watts)),
)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 5),
    clocks=st.integers(1, 5),
    levels=st.sampled_from([None, None, 4]),
    kind=goals,
    per_block=st.booleans(),
    switch=st.sampled_from([(0, 0), (0.05, 0), (0, 0.1), (0.1, 0.05), (1, 1), (100, 100)]),
)
@example(161, 1, 4, None, ("edp", 1.0), False, (0, 0))  # a product below 1 has a negative logarithm
def test_plan_equals_brute_force(seed, blocks, clocks, levels, kind, per_block, switch) -> None:
    table = random_table(seed, blocks, clocks, levels)
    switching = Switching(*switch)
    everything = every_choice(table, switching, per_block)
    name, value = kind
    times = sorted(latency for latency, _ in everything)
    goal: Goal = {
        "deadline": lambda: Deadline(times[0] + value * (times[-1] - times[0])),
        "edp": lambda: EnergyDelay(value),
        "price": lambda: PricedTime(value),
    }[name]()
    found = plan(table, goal, per_block=per_block, switching=switching, tolerance=0)
    best = min(score(goal, *pair) for pair in everything)
    assert score(goal, found.latency_s, found.energy_j) == pytest.approx(best, rel=1e-9)
    assert recount(table, found, switching) == pytest.approx((found.latency_s, found.energy_j))
    assert found.gap <= 1e-11
    assert per_block or len(set(found.clocks_mhz)) == 1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 4),
    clocks=st.integers(1, 4),
    per_block=st.booleans(),
    switch=st.sampled_from([(0, 0), (0.1, 0.05)]),
)
def test_the_front_is_what_brute_force_finds(seed, blocks, clocks, per_block, switch) -> None:
    table, switching = random_table(seed, blocks, clocks), Switching(*switch)
    everything = every_choice(table, switching, per_block)
    undominated = {
        pair
        for pair in everything
        if not any(o[0] <= pair[0] and o[1] <= pair[1] and o != pair for o in everything)
    }
    points = front(table, per_block=per_block, switching=switching, limit=1000)
    pairs = [(point.latency_s, point.energy_j) for point in points]
    assert pairs == sorted(pairs)
    for pair in pairs:
        assert min(abs(o[0] - pair[0]) + abs(o[1] - pair[1]) for o in undominated) < 1e-9
    if not per_block:
        assert len(pairs) == len(undominated)
    for price in (0.0, 0.3, 1.0, 4.0):  # each hull corner is there
        least = min(e + price * t for t, e in everything)
        assert min(e + price * t for t, e in pairs) == pytest.approx(least)


@pytest.mark.parametrize("switching", [Switching(), Switching(20e-6, 1e-3)])
def test_a_large_network_is_planned_to_the_tolerance(switching: Switching) -> None:
    table = smooth_table(200, 100)
    fastest = plan(table, PricedTime(1e9), per_block=True).latency_s
    for stretch in (1.05, 1.3, 1.7):
        found = plan(table, Deadline(fastest * stretch), per_block=True, switching=switching)
        one = plan(table, Deadline(fastest * stretch))
        assert found.latency_s <= fastest * stretch * (1 + 1e-12)
        assert found.energy_j < one.energy_j
        assert found.gap <= 1.1e-5


def test_an_impossible_deadline_names_the_nearest() -> None:
    table = random_table(1, 3, 4)
    fastest = float(table.latency_s.min(axis=1).sum())
    with pytest.raises(DeadlineImpossible, match="nearest possible is") as caught:
        plan(table, Deadline(fastest * 0.99), per_block=True)
    assert caught.value.nearest_s == pytest.approx(fastest)
    met = plan(table, Deadline(caught.value.nearest_s), per_block=True)
    assert met.latency_s == pytest.approx(fastest)


def test_single_clock_and_order_do_not_matter() -> None:
    single = clock_table([1000], [[1.0], [2.0]], energy_j=[[3.0], [4.0]])
    assert plan(single, Deadline(3), per_block=True).energy_j == 7
    up = clock_table([500, 900], [[2.0, 1.0]], energy_j=[[1.0, 2.0]])
    down = clock_table([900, 500], [[1.0, 2.0]], energy_j=[[2.0, 1.0]])
    assert np.array_equal(up.latency_s, down.latency_s)
    assert plan(up, Deadline(1.5)) == plan(down, Deadline(1.5))


def test_repeated_clocks_are_averaged() -> None:
    table = clock_table([900, 500, 900], [[1.0, 4.0, 3.0]], power_w=[[10.0, 5.0, 20.0]])
    assert table.clocks_mhz.tolist() == [500, 900]
    assert table.latency_s.tolist() == [[4.0, 2.0]]
    assert table.energy_j.tolist() == [[20.0, 35.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [[]], {"energy_j": [[]]}), "empty"),
        (([500], [[1.0, 2.0]], {"energy_j": [[1.0, 2.0]]}), "shapes do not fit"),
        (([500], [[1.0]], {}), "either energy_j or power_w"),
        (([500], [[0.0]], {"energy_j": [[1.0]]}), "latency_s of block '0' at 500 MHz"),
        (([500], [[1.0]], {"energy_j": [[-1.0]]}), "energy_j of block '0' at 500 MHz"),
        (([500], [[math.nan]], {"energy_j": [[1.0]]}), "positive and finite, got nan"),
        (([-500], [[1.0]], {"energy_j": [[1.0]]}), "clock_mhz must be positive"),
        (([500e6], [[1.0]], {"energy_j": [[1.0]]}), "another unit"),
        (([1.5], [[1.0]], {"energy_j": [[1.0]]}), "another unit"),
        (([500], [[1.0]], {"power_w": [[150e3]]}), "mixed up"),
        (([500], [[1.0]], {"power_w": [[100.0]], "blocks": ["a", "b"]}), "2 block names"),
    ],
)
def test_bad_tables_are_refused(arguments, message: str) -> None:
    clocks, latency, rest = arguments
    with pytest.raises(ConfigurationError, match=message):
        clock_table(clocks, latency, **rest)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Deadline(0),
        lambda: Deadline(math.inf),
        lambda: EnergyDelay(-1),
        lambda: PricedTime(-0.1),
        lambda: PricedTime(math.nan),
        lambda: Switching(-1, 0),
    ],
)
def test_bad_goals_are_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()
