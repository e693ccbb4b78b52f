from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_energy.errors import ConfigurationError
from tvm_energy.objective import (
    DEFAULT_OBJECTIVE,
    EnergyDelay,
    Latency,
    Objective,
    SlowdownBound,
    Weighted,
    parse_objective,
)

SPECS = [
    "latency",
    "energy",
    "edp",
    "ed2p",
    "energy:slack=0.05",
    "energy:slack=0",
    "weighted:eta=0.5,max_power_w=400",
]
OBJECTIVES = [parse_objective(spec) for spec in SPECS]
LATENCY_S = np.array([1.00e-3, 1.04e-3, 1.05e-3, 1.20e-3])
ENERGY_J = np.array([0.20, 0.15, 0.14, 0.10])


def cost(spec: str) -> list[float]:
    return list(parse_objective(spec, max_power_w=400).cost(LATENCY_S, ENERGY_J, 1.00e-3))


@pytest.mark.parametrize("spec", SPECS)
def test_the_spec_gives_the_same_objective_back(spec: str) -> None:
    objective = parse_objective(spec)
    assert objective.spec == spec
    assert parse_objective(objective.spec) == objective
    assert parse_objective(objective) is objective


def test_the_default_bounds_the_slowdown_to_five_percent() -> None:
    assert parse_objective(DEFAULT_OBJECTIVE) == SlowdownBound(0.05)


def test_costs_by_hand() -> None:
    assert cost("latency") == pytest.approx([1.00e-3, 1.04e-3, 1.05e-3, 1.20e-3])
    assert cost("energy") == pytest.approx([0.20, 0.15, 0.14, 0.10])
    assert cost("edp") == pytest.approx([2.0e-4, 1.56e-4, 1.47e-4, 1.2e-4])
    assert cost("ed2p") == pytest.approx([2.0e-7, 1.6224e-7, 1.5435e-7, 1.44e-7])
    assert cost("weighted:eta=0.5") == pytest.approx([0.30, 0.283, 0.28, 0.29])


def test_a_kernel_beyond_the_slack_is_not_acceptable() -> None:
    assert cost("energy:slack=0.05")[:2] == [0.20, 0.15]
    assert cost("energy:slack=0.05")[3] == math.inf
    assert cost("energy:slack=0") == [0.20, math.inf, math.inf, math.inf]
    assert cost("energy:slack=0.2") == [0.20, 0.15, 0.14, 0.10]


def test_search_cost_is_finite_and_grows_beyond_the_slack() -> None:
    bound = SlowdownBound(0.05)
    latency_s = np.array([1.0, 1.05, 1.1, 1.5, 3.0])
    values = bound.search_cost(latency_s, np.ones(5), 1.0)
    assert np.all(np.isfinite(values))
    assert values[0] == values[1] == 1
    assert np.all(np.diff(values[1:]) > 0)
    assert values[2] == pytest.approx((1.1 / 1.05) ** 4)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_ends_of_weighted_are_time_and_energy(eta: float) -> None:
    values = Weighted(eta, 400).cost(LATENCY_S, ENERGY_J, 1e-3)
    assert list(values) == pytest.approx(list(ENERGY_J if eta else 400 * LATENCY_S))


def test_only_latency_needs_no_energy() -> None:
    assert [objective.needs_energy for objective in OBJECTIVES] == [False] + [True] * 6
    assert all(objective.slack >= 0 for objective in OBJECTIVES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown objective '' ?; known are latency, energy, edp"),
        ("speed", "unknown objective 'speed'; known are latency"),
        ("Energy", "unknown objective 'Energy'"),
        ("energy:slack", "'slack' is not of the form option=number"),
        ("energy:slack=", "option=number"),
        ("energy:slack=much", "option=number"),
        ("energy:slack=nan", "option=number"),
        ("energy:slack=inf", "option=number"),
        ("energy:slack=-0.1", "between 0 and 10"),
        ("energy:slack=11", "between 0 and 10"),
        ("energy:eta=0.5", "an option that 'energy' does not know"),
        ("latency:slack=0.1", "an option that 'latency' does not know"),
        ("edp:slack=0.1", "an option that 'edp' does not know"),
        ("weighted:eta=1.5,max_power_w=400", "eta must lie between 0 and 1"),
        ("weighted:max_power_w=0", "max_power_w must be positive"),
    ],
)
def test_wrong_specs_say_what_is_right(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_objective(spec)


def test_weighted_takes_the_power_limit_of_the_device() -> None:
    assert parse_objective("weighted:eta=0.5", max_power_w=450) == Weighted(0.5, 450)
    assert parse_objective("weighted:eta=0.5,max_power_w=300", max_power_w=450) == Weighted(
        0.5, 300
    )
    with pytest.raises(ConfigurationError, match=r"weighted:eta=0\.5,max_power_w=400"):
        parse_objective("weighted:eta=0.5")


def test_spaces_do_not_matter() -> None:
    assert parse_objective(" energy: slack=0.1 ,") == SlowdownBound(0.1)


@given(st.text(max_size=30))
def test_any_text_is_an_objective_or_a_clear_error(spec: str) -> None:
    try:
        objective = parse_objective(spec, max_power_w=400)
    except ConfigurationError:
        return
    assert parse_objective(objective.spec) == objective


positive = st.floats(min_value=1e-9, max_value=1e6)


@given(
    objective=st.sampled_from(OBJECTIVES),
    latency_s=positive,
    energy_j=positive,
    more=st.floats(min_value=1.0, max_value=100.0),
)
def test_more_energy_or_more_time_is_never_better(
    objective: Objective, latency_s: float, energy_j: float, more: float
) -> None:
    for evaluate in (objective.cost, objective.search_cost):
        base = evaluate(np.array([latency_s]), np.array([energy_j]), latency_s)[0]
        assert evaluate(np.array([latency_s]), np.array([more * energy_j]), latency_s)[0] >= base
        assert evaluate(np.array([more * latency_s]), np.array([energy_j]), latency_s)[0] >= base
        assert base > 0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.spec)
def test_no_kernels_have_no_costs(objective: Objective) -> None:
    empty = np.array([])
    assert objective.cost(empty, empty, 1.0).shape == (0,)
    assert objective.search_cost(empty, empty, 1.0).shape == (0,)


def test_objectives_are_values() -> None:
    assert len({Latency(), Latency(), EnergyDelay(1), EnergyDelay(1), EnergyDelay(2)}) == 3
