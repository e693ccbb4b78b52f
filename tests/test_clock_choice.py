"""The choice of kernel and clock: against brute force, and what a log says of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_examples import at_clock, candidate, final, header, measurement, two_tasks
from rich.console import Console

from tvm_energy.clock_choice import (
    DEFAULT,
    ONE,
    PER_KERNEL,
    TaskKernels,
    best_options,
    choose_all,
    cost_of,
    mode_of,
)
from tvm_energy.errors import ConfigurationError
from tvm_energy.logs.load import comparable, differences
from tvm_energy.objective import parse_objective
from tvm_energy.ranking import Kernel
from tvm_energy.records import Header, TaskRecord
from tvm_energy.replay import summarize
from tvm_energy.report import print_report
from tvm_energy.report_facts import saving
from tvm_energy.report_html import render_html
from tvm_energy.report_markdown import render_markdown

OBJECTIVES = ("energy:slack=0", "energy:slack=0.1", "energy", "edp", "ed2p", "weighted:eta=0.4")


def task(
    default: dict[str, tuple[float, float]],
    points: dict[tuple[str, float], tuple[float, float]] | None = None,
    weight: float = 1.0,
    stderr: float = 1e-6,
) -> TaskKernels:
    """Of (latency, energy) by kernel, and by kernel and clock."""
    return TaskKernels(
        kernels={
            key: Kernel(
                key=key,
                latency_s=t,
                measured=measurement(e, t, relative_stderr=stderr),
                final=True,
            )
            for key, (t, e) in default.items()
        },
        points={
            (key, mhz): at_clock(key, mhz, t, e, relative_stderr=stderr, confirmed=True)
            for (key, mhz), (t, e) in (points or {}).items()
        },
        weight=weight,
    )


def picked(tasks: dict[str, TaskKernels], objective: str, mode: str = ONE) -> dict[str, tuple]:
    choices = choose_all(tasks, parse_objective(objective, max_power_w=300), mode)
    return {w: (c.best.key, c.best.clock_mhz) for w, c in choices.items()}


A = task({"fast": (1.0, 10.0), "frugal": (1.04, 9.0)}, {
    ("fast", 1000.0): (1.1, 8.0),
    ("frugal", 1000.0): (1.2, 7.0),
    ("fast", 1200.0): (1.04, 8.5),
    ("frugal", 1200.0): (1.08, 8.0),
})  # fmt: skip


@pytest.mark.parametrize(
    ("slack", "expected"),
    [
        (0.0, ("fast", None)),
        (0.05, ("fast", 1200.0)),  # neither the frugal kernel nor the fast one at the default clock
        (0.1, ("fast", 1000.0)),  # as frugal as ("frugal", 1200) to the digit, see below
        (0.25, ("frugal", 1000.0)),
    ],
)
def test_one_task(slack: float, expected: tuple) -> None:
    points = dict(A.points)
    points["fast", 1000.0] = at_clock("fast", 1000.0, 1.1, 7.9, relative_stderr=1e-6)
    tasks = {"w": replace(A, points=points)}
    assert picked(tasks, f"energy:slack={slack}") == {"w": expected}
    assert picked(tasks, f"energy:slack={slack}", PER_KERNEL) == {"w": expected}
    assert picked(tasks, f"energy:slack={slack}", DEFAULT)["w"][1] is None


def test_a_tie_goes_to_the_faster_pair_and_a_useless_lock_is_left_out() -> None:
    tie = task(
        {"a": (1.0, 10.0)},
        {("a", 1000.0): (1.02, 9.0), ("a", 900.0): (1.04, 8.99), ("a", 1410.0): (0.999, 9.995)},
        stderr=0.003,
    )
    assert picked({"w": tie}, "energy:slack=0.1") == {"w": ("a", 1000.0)}
    only_top = replace(tie, points={k: v for k, v in tie.points.items() if k[1] == 1410.0})
    assert picked({"w": only_top}, "energy:slack=0.1") == {"w": ("a", None)}


def test_a_short_measurement_that_leads_is_not_passed_over_for_a_tie() -> None:
    tie = task({"a": (1.0, 10.0)}, {("a", 1000.0): (1.02, 9.0)}, stderr=0.003)
    points = {**tie.points, ("a", 900.0): at_clock("a", 900.0, 1.04, 8.9, relative_stderr=0.02)}
    for mode in (ONE, PER_KERNEL):
        assert picked({"w": replace(tie, points=points)}, "energy:slack=0.1", mode) == {
            "w": ("a", 900.0)
        }


def test_latency_never_asks_for_a_clock() -> None:
    assert picked({"w": A}, "latency") == {"w": ("fast", None)}


def test_one_clock_for_a_network_weighs_its_tasks() -> None:
    """Compute-bound "c" loses time at a low clock, memory-bound "m" does not."""

    def network(calls: float) -> dict[str, TaskKernels]:
        return {
            "c": task({"c": (1.0, 10.0)}, {("c", 1000.0): (1.4, 9.0)}),
            "m": task({"m": (1.0, 10.0)}, {("m", 1000.0): (1.0, 6.0)}, weight=calls),
        }

    assert picked(network(1), "energy:slack=0.1") == {"c": ("c", None), "m": ("m", None)}
    assert picked(network(9), "energy:slack=0.1") == {"c": ("c", 1000.0), "m": ("m", 1000.0)}
    per_kernel = picked(network(1), "energy:slack=0.1", PER_KERNEL)
    assert per_kernel == {"c": ("c", None), "m": ("m", 1000.0)}


def test_tasks_without_points_keep_their_choice() -> None:
    tasks = {"w": A, "other": task({"x": (2.0, 5.0)}), "nothing": TaskKernels(kernels={})}
    assert picked(tasks, "energy:slack=0.05") == {"w": ("fast", 1200.0), "other": ("x", None)}


def test_a_clock_that_a_task_was_not_measured_at_is_not_chosen_for_all() -> None:
    second = task({"x": (2.0, 5.0)}, {("x", 900.0): (2.1, 4.0)})
    assert {clock for _, clock in picked({"a": A, "b": second}, "energy").values()} == {None}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    objective=st.sampled_from(OBJECTIVES),
    tasks=st.integers(1, 3),
)
def test_options_equal_brute_force(seed: int, objective: str, tasks: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, tasks)
    latency = [1 + rng.random(size) for size in sizes]
    energy = [5 + 5 * rng.random(size) for size in sizes]
    weights = (1 + rng.integers(0, 4, tasks)).tolist()
    fastest = sum(w * t.min() for w, t in zip(weights, latency, strict=True))
    parsed = parse_objective(objective, max_power_w=20)

    def cost(choice: tuple[int, ...]) -> float:
        t, e = (
            sum(w * values[i] for w, values, i in zip(weights, table, choice, strict=True))
            for table in (latency, energy)
        )
        return cost_of(parsed, t, e, fastest * (1 + 1e-12))

    chosen, found = best_options(latency, energy, weights, parsed, fastest)
    best = min(map(cost, itertools.product(*map(range, sizes))))
    assert cost(chosen) == pytest.approx(best, rel=2e-5)
    assert found == pytest.approx(best, rel=2e-5)


# -- logs ------------------------------------------------------------------------------------------

FINALISTS = {"finalists": 3, "per_kernel": False}


def log(clocks: dict | None = FINALISTS, **more: object) -> list:
    return [
        header(clocks=clocks),
        TaskRecord(task="matmul", workload="w0"),
        candidate("a", 1.00e-3, 0.200),
        candidate("b", 1.04e-3, 0.190),
        final("a", 1.00e-3, 0.200, 2),
        final("b", 1.04e-3, 0.190, 2),
        at_clock("a", 1200.0, 1.03e-3, 0.180),
        at_clock("a", 1000.0, 1.20e-3, 0.150),
        at_clock("b", 1200.0, 1.07e-3, 0.170),
        at_clock("a", 1200.0, 1.03e-3, 0.181, confirmed=True),
    ]


def test_a_summary_recomputes_the_pair_from_raw_points() -> None:
    summary = summarize(log())
    (found,) = summary.tasks
    assert (summary.clock_choice, summary.clock_mhz) == (ONE, 1200.0)
    assert found.best is not None
    assert (found.best.key, found.best.clock_mhz) == ("a", 1200.0)
    assert found.best.energy_j == 0.181  # the last line of the pair
    assert found.at_default is not None
    assert found.at_default.key == "b"
    assert found.saved_fraction == pytest.approx(1 - 0.181 / 0.2)
    assert found.clock_saved_fraction == pytest.approx(1 - 0.181 / 0.19)
    assert found.clocks == 2
    assert summary.totals is not None
    assert summary.totals.clock_saved_fraction == found.clock_saved_fraction
    slack = summarize(log(), "energy:slack=0.3")
    assert slack.clock_mhz == 1000.0


def test_a_run_without_clocks_leaves_the_clock_alone_unless_asked() -> None:
    assert summarize(log(None)).tasks[0].best.clock_mhz is None  # type: ignore[union-attr]
    assert summarize(log(None), clock_choice="one").clock_mhz == 1200.0
    assert summarize(log(), clock_choice="default").tasks[0].at_default is None
    with pytest.raises(ConfigurationError, match="per-kernel"):
        summarize(log(), clock_choice="all")
    with pytest.raises(ConfigurationError, match="--clocks 5"):
        summarize(two_tasks(), clock_choice="one")


def test_every_report_names_the_clock_and_what_it_saves() -> None:
    summary = summarize(log())
    console = Console(width=160, file=StringIO())
    print_report(summary, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for output in (text, render_markdown(summary), render_html(summary, log())):
        flat = " ".join(output.split())
        assert "lock 1200 MHz" in flat
        assert "4.7 % less energy" in flat
    assert "Finalists at 2 locked clocks" in render_html(summary, log())
    plain = render_markdown(summarize(log(None)))
    assert "MHz" not in plain
    nothing = summarize([record for record in log() if record.kind != "clock"])
    assert "the clock is left to the driver" in render_markdown(nothing)
    # The same kernel at another clock is not the same choice: its saving has an error.
    saved = saving(summary)
    assert saved is not None
    assert saved.margin > 0


def test_points_of_kernels_that_are_no_finalists_any_more_do_not_win() -> None:
    records = [*log(), candidate("c", 0.9e-3, 0.18), final("c", 0.9e-3, 0.18, 3)]
    (found,) = summarize(records).tasks
    assert found.best is not None
    assert (found.best.key, found.best.clock_mhz) == ("c", None)


def test_headers_tell_runs_locked_to_a_clock_apart_but_not_those_with_a_sweep() -> None:
    plain, swept = header(), header(clocks=FINALISTS)
    locked = header(clocks={"core_mhz": 1200})
    assert differences(plain, swept) == []
    assert any("core_mhz 1200" in reason for reason in differences(plain, locked))
    assert mode_of(plain) == mode_of(locked) == DEFAULT
    assert mode_of(swept) == ONE
    assert mode_of(header(clocks={"finalists": 3, "per_kernel": True})) == PER_KERNEL


def test_points_measured_under_another_plan_are_set_aside() -> None:
    other = [header(plan={"window_s": 0.5}, clocks=FINALISTS)]
    kept, left_out = comparable([*log(), *other], other[0])
    assert left_out == 8
    assert not any(record.kind == "clock" for record in kept)
    assert sum(isinstance(record, Header) for record in kept) == 2
