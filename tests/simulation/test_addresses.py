from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_energy.simulation.addresses import (
    AddressSet,
    Footprint,
    components,
    const,
    evaluate,
    terms,
    units_per_request,
    var,
    variables,
    vector_runs,
    wavefronts_per_request,
)

LANES = np.arange(32)[None, :]
ALL = np.ones((1, 32), dtype=bool)


def test_evaluates_floor_division_like_tvm() -> None:
    x = var("x")
    node = ("+", ("*", ("//", x, const(4)), const(10)), ("%", x, const(4)))
    assert evaluate(node, {"x": np.arange(9)}).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20]
    assert int(evaluate(("//", const(-7), const(2)), {})) == -4
    assert int(evaluate(("truncdiv", const(-7), const(2)), {})) == -3
    assert int(evaluate(("truncmod", const(-7), const(2)), {})) == -1


def test_unknown_values_scatter_but_stay_the_same() -> None:
    once = evaluate(("scatter", var("x")), {"x": np.arange(64)})
    again = evaluate(("scatter", var("x")), {"x": np.arange(64)})
    assert (once == again).all()
    assert len(set((once // 32).tolist())) > 60


def test_terms_are_flattened_with_their_signs() -> None:
    node = ("+", var("a"), ("*", ("-", var("b"), var("c")), const(3)))
    assert terms(node) == [(1, var("a")), (3, var("b")), (-3, var("c"))]


def test_components_share_no_variable() -> None:
    mixed = ("//", ("+", var("x"), ("*", var("y"), const(8))), const(4))
    node = ("+", ("+", mixed, ("*", var("z"), const(5))), ("%", var("y"), const(2)))
    assert sorted(sorted(map(str, part.keys)) for part in components(node)) == [["x", "y"], ["z"]]


@st.composite
def index_and_extents(draw: st.DrawFn) -> tuple[tuple, dict[str, int]]:
    extents = {name: draw(st.integers(1, 9)) for name in "abc"}
    node: tuple = const(0)
    for name in extents:
        factor = draw(st.integers(-12, 40))
        node = ("+", node, ("*", var(name), const(factor)))
    divisor = draw(st.integers(1, 7))
    other = ("+", var("a"), ("*", var("b"), const(draw(st.integers(1, 9)))))
    node = ("+", node, ("*", ("//", other, const(divisor)), const(draw(st.integers(0, 50)))))
    return node, extents


@given(index_and_extents())
@settings(max_examples=100, deadline=None)
def test_footprint_of_small_loops_is_exact(case: tuple[tuple, dict[str, int]]) -> None:
    node, extents = case
    points = itertools.product(*(range(extent) for extent in extents.values()))
    expected = {int(evaluate(node, dict(zip(extents, point, strict=True)))) for point in points}
    offset = evaluate(node, dict.fromkeys(extents, 0))
    found = Footprint(components(node)).touched(extents)
    assert found.size == len(expected)
    sectors = {(value - offset) * 4 // 32 for value in expected}
    assert found.bytes_in_units(4, 32) == 32 * len(sectors)


def test_footprint_of_large_loops_is_close() -> None:
    # A 2-D tile of rows 4096 apart, far more points than are written out.
    node = ("+", ("*", var("row"), const(4096)), var("column"))
    found = Footprint(components(node)).touched({"row": 5000, "column": 1000})
    assert found.size == pytest.approx(5_000_000, rel=0.01)
    # A sliding window: 3 taps reuse two thirds of what the neighbours read.
    node = ("+", var("position"), var("tap"))
    found = Footprint(components(node)).touched({"position": 100_000, "tap": 3})
    assert found.size == pytest.approx(100_002, rel=0.1)


def test_sum_of_many_intervals_is_extrapolated() -> None:
    rows = AddressSet.of(np.arange(3000) * 100)
    grid = rows.plus(AddressSet.of(np.arange(2000) * 1_000_000))
    assert grid.size == pytest.approx(6_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("stride", "width", "sectors"),
    [
        (4, 4, 4),
        (8, 8, 8),
        (8, 4, 8),
        (32, 4, 32),
        (4096, 4, 32),
        (0, 4, 1),
        (16, 16, 16),
        (2, 2, 2),
    ],
)
def test_sectors_of_a_request(stride: int, width: int, sectors: int) -> None:
    assert units_per_request(LANES * stride, ALL, width, 32).tolist() == [sectors]


def test_misaligned_requests_touch_one_sector_more() -> None:
    assert units_per_request(LANES * 4 + 4, ALL, 4, 32).tolist() == [5]


def test_inactive_threads_ask_for_nothing() -> None:
    active = ALL.copy()
    active[:, 8:] = False
    assert units_per_request(LANES * 4, active, 4, 32).tolist() == [1]


@pytest.mark.parametrize(
    ("stride", "width", "passes"),
    [
        (4, 4, 1),  # one word a bank
        (0, 4, 1),  # broadcast
        (8, 4, 2),
        (12, 4, 1),  # odd strides are free of conflicts
        (128, 4, 32),  # all threads in one bank
        (132, 4, 1),  # ... cured by padding
        (8, 8, 2),  # 256 bytes
        (16, 16, 4),  # 512 bytes
        (0, 16, 1),  # a broadcast of 16 bytes
        (2, 2, 1),  # float16: two threads share a word
    ],
)
def test_shared_memory_passes(stride: int, width: int, passes: int) -> None:
    assert wavefronts_per_request(LANES * stride, ALL, width).tolist() == [passes]


def test_contiguous_elements_become_wide_accesses() -> None:
    assert vector_runs(list(range(8)), 4, 16) == {4: 2}
    assert vector_runs([0, 1, 2, 3, 4, 5], 4, 16) == {4: 1, 2: 1}
    assert vector_runs([1, 2, 3, 4], 4, 16) == {1: 2, 2: 1}
    assert vector_runs([0, 8, 16], 4, 16) == {1: 3}
    assert vector_runs(list(range(8)), 2, 16) == {8: 1}


def test_variables_of_an_expression() -> None:
    assert variables(("select", var("c"), var("a"), const(1))) == {"a", "c"}
