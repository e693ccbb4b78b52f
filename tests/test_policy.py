from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_energy.errors import ConfigurationError
from tvm_energy.policy import (
    Feedback,
    Gain,
    Gate,
    PolicyState,
    Snr,
    expected_improvement,
    parse_policy,
    state_from_json,
    state_to_json,
)


def gate(count: int, predicted: bool = True) -> Gate:
    energy_j = np.arange(count, 0, -1, dtype=float)  # the last is the lowest
    return Gate(
        latency_s=np.ones(count),
        energy_j=energy_j if predicted else None,
        energy_stderr_j=0.1 * energy_j if predicted else None,
    )


def feedback(error: float, count: int = 20, seed: int = 0) -> Feedback:
    """Predictions off by `error` standard deviations of the true energies."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(10, 1, count)
    return Feedback(
        gated=count,
        measured=count,
        measured_j=truth,
        predicted_j=truth + error * rng.normal(0, 1, count),
    )


@pytest.mark.parametrize("spec", ["all", "none", "fixed:0.25", Snr().spec, Gain().spec])
def test_spec_is_read_back(spec: str) -> None:
    assert parse_policy(spec).spec == spec
    assert parse_policy(parse_policy(spec)).spec == spec


def test_snr_options() -> None:
    assert parse_policy("snr:threshold=20,step=0.1,start=0.8,floor=0.2") == Snr(20, 0.1, 0.8, 0.2)
    assert parse_policy("snr") == Snr()
    assert parse_policy(" all ") == parse_policy("all")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("most", "unknown policy 'most'; known are all, none"),
        ("fixed", "write fixed:0.25"),
        ("fixed:x", "write fixed:0.25"),
        ("fixed:2", "between 0 and 1, got 2"),
        ("fixed:nan", "between 0 and 1"),
        ("snr:speed=1", "'speed=1' is not one of"),
        ("snr:step=x", "'step=x' is not one of"),
        ("snr:step=0", "0 < step"),
        ("snr:floor=0", "0 < floor"),
        ("all:3", "unknown policy"),
    ],
)
def test_wrong_specs(spec: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse_policy(spec)


def test_all_none_and_fixed() -> None:
    rng = np.random.default_rng(0)
    choices = {
        spec: parse_policy(spec).choose(parse_policy(spec).start(), gate(10), rng)
        for spec in ("all", "none", "fixed:0.3")
    }
    assert choices["all"] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert choices["none"] == []
    assert choices["fixed:0.3"] == [9, 8, 7]


def test_snr_round_by_round() -> None:
    policy = Snr(threshold=6, step=0.3, start_fraction=1.0, floor=0.1)
    state = policy.start()
    fractions = [state.fraction]
    for quality in [feedback(0.1), feedback(0.1), feedback(0.1), feedback(2.0), feedback(2.0)]:
        state = policy.update(state, quality)
        fractions.append(state.fraction)
    assert fractions == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.4, 0.7])
    assert state.rounds == 5


def test_snr_in_decibels() -> None:
    truth = np.array([1.0, 2.0, 3.0])
    assert Feedback(measured_j=truth, predicted_j=truth + 0.1).snr_db == pytest.approx(
        10 * math.log10(2 / 0.03)
    )
    mean = Feedback(measured_j=truth, predicted_j=np.full(3, 2.0)).snr_db
    assert mean == pytest.approx(0.0)
    assert Feedback(measured_j=truth[:2], predicted_j=truth[:2] + 1).snr_db is None
    assert Feedback().snr_db is None


def test_the_signal_is_the_spread_of_all_rounds() -> None:
    """Alike kernels do not make a good model look bad; predicting the mean is still worth nothing."""
    alike, far = np.array([1.0, 1.01, 1.02]), np.array([1.5, 2.0, 2.5])
    alone = Feedback(measured_j=alike, predicted_j=alike + 0.02)
    among = Feedback(measured_j=alike, predicted_j=alike + 0.02, earlier_j=far)
    assert alone.snr_db is not None
    assert alone.snr_db < 0
    spread = np.var([1.0, 1.01, 1.02, 1.5, 2.0, 2.5])
    assert among.snr_db == pytest.approx(10 * math.log10(spread / 0.02**2))
    mean = Feedback(measured_j=far, predicted_j=np.full(3, far.mean()), earlier_j=far)
    assert mean.snr_db == pytest.approx(0.0)


def test_k_moves_only_with_what_was_learned() -> None:
    policy, state = Snr(step=0.2), PolicyState(fraction=0.4)
    pair = np.array([1.0])
    few = Feedback(gated=2, measured=1, measured_j=pair, predicted_j=pair)
    alike = np.full(4, 1.0)
    cases = {
        "too few pairs": (few, 0.6),
        "nothing passed the gate": (Feedback(), 0.4),
        "all measurements failed": (Feedback(gated=9, measured=0), 0.4),
        "no spread": (Feedback(measured=4, measured_j=alike, predicted_j=alike + 0.1), 0.4),
    }
    for name, (told, fraction) in cases.items():
        assert policy.update(state, told).fraction == pytest.approx(fraction), name


def test_first_round_measures_all_and_later_ones_probe() -> None:
    policy, rng = Snr(), np.random.default_rng(0)
    assert sorted(policy.choose(policy.start(), gate(8, predicted=False), rng)) == list(range(8))
    chosen = policy.choose(PolicyState(fraction=0.25), gate(8), rng)
    assert chosen[:2] == [7, 6]
    assert len(chosen) == 3
    assert chosen[2] in range(6)


@given(
    count=st.integers(0, 40),
    fraction=st.floats(0, 1),
    predicted=st.booleans(),
    spec=st.sampled_from(["all", "none", "fixed:0.2", "snr"]),
    seed=st.integers(0, 2**31),
)
def test_choices_are_valid(
    count: int, fraction: float, predicted: bool, spec: str, seed: int
) -> None:
    policy = parse_policy(spec)
    state = PolicyState(fraction=fraction)
    chosen = policy.choose(state, gate(count, predicted), np.random.default_rng(seed))
    assert len(set(chosen)) == len(chosen)
    assert all(0 <= index < count for index in chosen)
    assert chosen == policy.choose(state, gate(count, predicted), np.random.default_rng(seed))
    if spec != "none" and count:
        assert chosen


@given(errors=st.lists(st.floats(0, 5), max_size=30), seed=st.integers(0, 1000))
def test_k_stays_within_floor_and_one(errors: list[float], seed: int) -> None:
    policy = Snr()
    state = policy.start()
    for error in errors:
        state = policy.update(state, feedback(error, seed=seed))
        assert policy.floor - 1e-12 <= state.fraction <= 1
        assert state_from_json(json.loads(json.dumps(state_to_json(state)))) == state


@pytest.mark.parametrize("values", [{}, {"fraction": "x"}, {"fraction": 7}, {"rounds": -1}])
def test_broken_states_start_anew(values: dict[str, object]) -> None:
    assert state_from_json(values) == PolicyState()


def costs_of(cost: list[float], stderr: list[float], best: float, done: int = 0) -> Gate:
    values = np.array(cost)
    return Gate(
        latency_s=np.ones(len(cost)),
        energy_j=values,
        energy_stderr_j=np.array(stderr),
        cost=values,
        cost_stderr=np.array(stderr),
        best_cost=best,
        candidates=64,
        done=np.arange(len(cost)) < done,
    )


def test_expected_improvement_against_its_integral() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(1.02, 0.05, 400_000)
    expected = float(np.mean(np.maximum(1.0 - draws, 0)))
    found = expected_improvement(np.array([1.02]), np.array([0.05]), 1.0)
    assert found[0] == pytest.approx(expected, rel=0.01)


def test_gain_prefers_what_may_win_and_stops_when_nothing_can() -> None:
    rng = np.random.default_rng(0)
    gain = parse_policy("gain")
    # The second is as likely to be better as it is cheap to be sure of; the third may surprise most.
    assert gain.choose(gain.start(), costs_of([2.0, 0.99, 1.0], [0.01, 0.01, 0.2], 1.0), rng) == [2]
    assert gain.choose(gain.start(), costs_of([1.5, 1.2], [0.02, 0.02], 1.0), rng) == []
    assert gain.choose(gain.start(), costs_of([np.inf, 0.9], [0.0, 0.1], 1.0), rng) == [1]
    assert gain.choose(gain.start(), costs_of([np.inf, np.inf], [0.0, 0.0], 1.0), rng) == []
    assert gain.choose(gain.start(), costs_of([0.9, 0.8], [0.1, 0.1], np.inf), rng) == [1]


def test_gain_measures_no_more_than_its_share() -> None:
    rng = np.random.default_rng(0)
    gain = parse_policy("gain:share=0.1")
    seven = [0.5] * 7
    assert gain.choose(gain.start(), costs_of(seven, [0.1] * 7, 1.0, done=5), rng) == [5]
    assert gain.choose(gain.start(), costs_of(seven, [0.1] * 7, 1.0, done=6), rng) == []


def test_gain_begins_with_the_fastest_and_a_spread() -> None:
    gate = Gate(latency_s=np.arange(100.0), candidates=100, done=np.zeros(100, dtype=bool))
    first = parse_policy("gain:first=10")
    chosen = first.choose(first.start(), gate, np.random.default_rng(0))
    assert chosen[:5] == [0, 1, 2, 3, 4]
    assert len(set(chosen)) == 10
    assert max(chosen) == 99


def test_improvement_under_observed_errors() -> None:
    scores = np.sort(np.random.default_rng(0).standard_normal(4000))
    cost, stderr = np.array([0.9, 1.0, 1.3]), np.array([0.1, 0.05, 0.1])
    observed = expected_improvement(cost, stderr, 1.0, scores)
    np.testing.assert_allclose(observed, expected_improvement(cost, stderr, 1.0), atol=0.004)
    # Errors that never reach beyond half a standard error: what is 3 of them behind cannot win.
    bounded = np.linspace(-0.5, 0.5, 40)
    assert expected_improvement(cost, stderr, 1.0, bounded)[2] == 0.0
    # The measured energy is the prediction plus the error: errors of one sign count the right way.
    above, below = np.full(40, 0.5), np.full(40, -0.5)
    assert expected_improvement(cost[1:2], stderr[1:2], 1.0, above)[0] == 0.0
    assert expected_improvement(cost[1:2], stderr[1:2], 1.0, below)[0] == pytest.approx(0.025)
    few = expected_improvement(cost, stderr, 1.0, below[:5])
    np.testing.assert_array_equal(few, expected_improvement(cost, stderr, 1.0))
