from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_examples import candidate, final, header, measurement

from tvm_energy.objective import parse_objective
from tvm_energy.ranking import Choice, Kernel, choose, costs, kernels_by_workload

DEFAULT = parse_objective("energy:slack=0.05")


def kernel(key: str, latency_s: float, energy_j: float | None = None, **changes) -> Kernel:
    final_ = changes.pop("final", False)
    measured = None if energy_j is None else measurement(energy_j, latency_s, **changes)
    return Kernel(key=key, latency_s=latency_s, measured=measured, final=final_)


def chosen(kernels: list[Kernel], spec: str = "energy:slack=0.05") -> Choice:
    choice = choose(kernels, parse_objective(spec))
    assert choice is not None
    return choice


def keys(kernels) -> list[str]:
    return [item.key for item in kernels]


FAST = kernel("fast", 1.00e-3, 0.20)
SAVING = kernel("saving", 1.04e-3, 0.15)
SLOW = kernel("slow", 1.20e-3, 0.10)


def test_least_energy_within_the_slack_wins() -> None:
    choice = chosen([SLOW, FAST, SAVING])
    assert (choice.fastest, choice.best, choice.ties) == (FAST, SAVING, ())


@pytest.mark.parametrize(
    ("spec", "best"),
    [("latency", FAST), ("energy", SLOW), ("edp", SLOW), ("energy:slack=0.01", FAST)],
)
def test_the_objective_decides(spec: str, best: Kernel) -> None:
    assert chosen([SLOW, FAST, SAVING], spec).best is best


def test_only_a_measured_kernel_wins() -> None:
    believed = Kernel(key="believed", latency_s=0.9e-3, predicted_energy_j=0.01)
    choice = chosen([FAST, believed])
    assert (choice.fastest, choice.best) == (FAST, FAST)
    assert chosen([FAST, believed], "latency").best is believed


def test_nothing_to_choose_from() -> None:
    assert choose([], DEFAULT) is None
    assert choose([kernel("a", 1e-3)], DEFAULT) is None
    assert choose([kernel("a", 1e-3)], parse_objective("latency")) is not None


def test_a_difference_within_the_error_is_a_tie_and_the_faster_wins() -> None:
    better = kernel("better", 1.04e-3, 0.1500, relative_stderr=0.01)
    faster = kernel("faster", 1.02e-3, 0.1515, relative_stderr=0.01)
    choice = chosen([FAST, better, faster])
    assert (choice.best, choice.ties) == (faster, (better,))


def test_a_difference_beyond_the_error_is_none() -> None:
    better = kernel("better", 1.04e-3, 0.150, relative_stderr=0.001)
    faster = kernel("faster", 1.02e-3, 0.151, relative_stderr=0.001)
    choice = chosen([FAST, better, faster])
    assert (choice.best, choice.ties) == (better, ())


def test_a_kernel_beyond_the_slack_never_ties() -> None:
    inside = kernel("inside", 1.00e-3, 0.2, relative_stderr=0.5)
    outside = kernel("outside", 1.06e-3, 0.2, relative_stderr=0.5)
    assert chosen([inside, outside]).ties == ()


def test_the_error_of_the_energy_counts_as_far_as_the_objective_uses_energy() -> None:
    # With eta = 0 time alone decides, whatever the error of the energies.
    pair = [
        kernel("fast", 1.00e-3, 0.3, relative_stderr=0.2),
        kernel("slow", 1.01e-3, 0.3, relative_stderr=0.2),
    ]
    assert chosen(pair, "weighted:eta=0,max_power_w=400").ties == ()
    assert keys(chosen(pair, "weighted:eta=1,max_power_w=400").ties) == ["slow"]


def test_finalists_are_compared_among_themselves() -> None:
    one = kernel("one", 1.00e-3, 0.2, final=True)
    two = kernel("two", 1.01e-3, 0.18, final=True)
    lucky = kernel("lucky", 0.99e-3, 0.1)
    choice = chosen([lucky, one, two])
    assert (choice.fastest, choice.best) == (one, two)


def test_costs_are_infinite_without_a_needed_energy() -> None:
    assert costs([FAST, kernel("a", 1e-3)], parse_objective("edp"), 1e-3) == [
        pytest.approx(2e-4),
        float("inf"),
    ]


def test_costs_beyond_the_range_of_a_float_still_give_a_winner() -> None:
    huge = [kernel("a", 1e300, 1e300), kernel("b", 1e301, 1e300)]
    assert chosen(huge, "ed2p").best.key == "a"


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=1e-6, max_value=1e-3),
            st.none() | st.floats(min_value=1e-6, max_value=10),
            st.floats(min_value=0, max_value=0.2),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["latency", "energy", "edp", "energy:slack=0.05", "weighted:max_power_w=300"]),
)
def test_what_every_choice_promises(rows, spec: str) -> None:
    kernels = [
        kernel(
            str(index),
            latency_s,
            energy_j,
            relative_stderr=error,
            final=final_ and energy_j is not None,
        )
        for index, (latency_s, energy_j, error, final_) in enumerate(rows)
    ]
    objective = parse_objective(spec)
    choice = choose(kernels, objective)
    able = [item for item in kernels if item.measured or not objective.needs_energy]
    assert (choice is None) == (not able)
    if choice is None:
        return
    assert choice.best.measured or not objective.needs_energy
    assert choice.fastest.latency_s <= choice.best.latency_s
    assert all(choice.best.latency_s <= tie.latency_s for tie in choice.ties)
    assert choice.best not in choice.ties
    if spec == "energy:slack=0.05":
        assert choice.best.latency_s <= 1.05 * choice.fastest.latency_s
    if any(item.final for item in kernels):
        assert choice.best.final
        assert choice.fastest.final
    reversed_ = choose(kernels[::-1], objective)
    assert reversed_ is not None
    assert reversed_.best.latency_s == choice.best.latency_s


# -- kernels out of records ------------------------------------------------------------------------


def test_failed_candidates_are_no_kernels() -> None:
    found = kernels_by_workload([header(), candidate("a", None, error="build: no")])
    assert not any(found.values())


def test_a_kernel_met_again_keeps_latency_energy_and_prediction() -> None:
    first = candidate("a", 1.0e-3, 0.2, predicted_energy_j=0.21)
    again = candidate("a", 1.1e-3)
    known = kernels_by_workload([first, again])["w0"]["a"]
    assert known.latency_s == 1.0e-3
    assert known.energy_j == 0.2
    assert known.predicted_energy_j == 0.21


def test_an_energy_measured_later_is_taken() -> None:
    found = kernels_by_workload([candidate("a", 1.0e-3), candidate("a", 1.0e-3, 0.2)])
    assert found["w0"]["a"].energy_j == 0.2


def test_workloads_are_kept_apart() -> None:
    found = kernels_by_workload(
        [candidate("a", 1e-3, 0.2), candidate("a", 2e-3, 0.4, workload="w1")]
    )
    assert (found["w0"]["a"].energy_j, found["w1"]["a"].energy_j) == (0.2, 0.4)


def test_a_final_replaces_latency_and_energy() -> None:
    records = [candidate("a", 1.0e-3, 0.2, predicted_energy_j=0.3), final("a", 1.1e-3, 0.22, 1)]
    known = kernels_by_workload(records)["w0"]["a"]
    assert (known.latency_s, known.energy_j, known.final) == (1.1e-3, 0.22, True)
    assert known.predicted_energy_j == 0.3


def test_finals_lose_their_rank_when_kernels_are_added() -> None:
    records = [candidate("a", 1.0e-3, 0.2), final("a", 1.0e-3, 0.2, 1), candidate("b", 1.0e-3, 0.1)]
    found = kernels_by_workload(records)["w0"]
    assert not found["a"].final
    assert chosen(list(found.values())).best.key == "b"
    found = kernels_by_workload([*records, final("a", 1e-3, 0.2, 2), final("b", 1e-3, 0.21, 2)])[
        "w0"
    ]
    assert chosen(list(found.values())).best.key == "a"


def test_kernels_are_values() -> None:
    assert dataclasses.replace(FAST) == FAST
    assert hash(dataclasses.replace(FAST)) == hash(FAST)
