from __future__ import annotations

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_examples import candidate, header, two_tasks
from rich.console import Console

from tvm_energy.records import Record, TaskRecord
from tvm_energy.replay import summarize
from tvm_energy.report import (
    format_quantity,
    print_report,
    printable,
    shorten,
    simulated_banner,
    to_json,
)


def text_of(records: list[Record], objective: str | None = None, width: int = 120) -> str:
    stream = io.StringIO()
    print_report(summarize(records, objective), Console(file=stream, width=width), "out")
    return stream.getvalue()


def row(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return " ".join(line.split())


REAL = [
    header("NVIDIA H200", simulated=False),
    candidate("a", 1e-3, 0.2, simulated=False),
    candidate("b", 1.01e-3, 0.15, simulated=False),
]
TIED = [
    header(),
    candidate("a", 1.00e-3, 0.1500, relative_stderr=0.01),
    candidate("b", 1.01e-3, 0.1499, relative_stderr=0.01),
]


# -- the table -------------------------------------------------------------------------------------


def test_a_row_holds_fastest_chosen_saving_and_counts() -> None:
    assert row(text_of(two_tasks()), "fused") == (
        "fused_conv2d_add_relu (3×) 1.00 ms 200 mJ 1.04 ms 150 mJ 25.0 % 5 3 1"
    )
    assert row(text_of(two_tasks()), "matmul") == (
        "matmul 2.00 µs 300 µJ 2.00 µs 300 µJ 0.0 % 2 2 0"
    )


def test_all_calls_are_summed_with_their_weights() -> None:
    assert row(text_of(two_tasks()), "all calls") == (
        "all calls 3.00 ms 600 mJ 3.12 ms 450 mJ 25.0 % 7 5 1"
    )
    assert "What is summed over all calls leaves these out." in text_of(two_tasks())


def test_a_single_kernel_needs_no_sum() -> None:
    assert "all calls" not in text_of(REAL)


def test_a_narrow_terminal_gets_two_tables_and_no_cut_cell() -> None:
    text = text_of(two_tasks(), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = [
        " ".join(line.split())
        for line in text.splitlines()
        if line.strip().startswith("fused_conv2d")
    ]
    assert rows == [
        "fused_conv2d_add_relu (3×) 1.00 ms 200 mJ 1.04 ms 150 mJ 25.0 %",
        "fused_conv2d_add_relu (3×) 5 3 1",
    ]
    table, _, _ = text.partition("Time and energy")
    assert "…" not in table


@pytest.mark.parametrize("width", [80, 90, 107, 108, 109, 110, 120, 200])
def test_no_number_is_cut_at_any_width(width: int) -> None:
    wide = [
        header(),
        TaskRecord(task="n" * 60, workload="w0", weight=12),
        candidate("a", 1.23e-5, 0.123456, relative_stderr=0.01),
        candidate("b", 1.24e-5, 0.1234e-4, relative_stderr=0.01),
        candidate("c", 1.25e-5, 0.1233e-4, relative_stderr=0.01),
        *(candidate(f"p{number}", 1.0, predicted_energy_j=1.0) for number in range(2000)),
    ]
    table, _, _ = text_of(wide, width=width).partition("Time and energy")
    assert "≈ 12.3 µJ" in table
    assert "100.0 %" in table
    assert table.count("…") == (1 if width >= 109 else 2)  # in the name alone, in each table


def test_long_names_lose_their_middle() -> None:
    name = "fused_conv2d_add_multiply_very_long_indeed_relu_12"
    text = text_of([header(), TaskRecord(task=name, workload="w0"), candidate("a", 1e-3, 0.2)])
    (shown,) = [word for word in text.split() if word.startswith("fused")]
    assert shown.startswith("fused_conv2d")
    assert "…" in shown
    assert shown.endswith("relu_12")


def test_failures_and_reasons_are_told() -> None:
    text = text_of(two_tasks())
    assert "No kernel for broken: none of 2 candidates ran; most often: run: timeout" in text
    assert "1 of 7 candidates failed" in text


def test_kernels_that_were_too_slow_are_counted() -> None:
    text = text_of([*REAL, candidate("slow", 1.0)])
    assert "1 kernel was tried for time alone" in text
    assert "time alone:" not in text_of(REAL)


def test_ties_are_marked_and_explained() -> None:
    assert "≈ 150 mJ" in text_of(TIED)
    assert "as good within the error" in text_of(TIED)
    assert "≈" not in text_of(REAL)


def test_the_largest_error_is_told() -> None:
    assert "largest standard error among them is 1.0%" in text_of(TIED)


def test_it_says_where_the_results_are_and_what_can_be_done() -> None:
    where = "a folder/" + "x" * 200
    stream = io.StringIO()
    print_report(summarize(REAL), Console(file=stream, width=80), where)
    lines = stream.getvalue().splitlines()
    assert f"Results are in {where}" in lines
    assert f"Rank them again with: tvm-energy replay '{where}' --objective edp" in lines


def test_without_energies_there_are_dashes_and_no_saving() -> None:
    text = text_of([header("cpu", "latency", simulated=False, meter=None), candidate("a", 1e-3)])
    assert row(text, "w0") == "w0 1.00 ms – 1.00 ms – – 1 0 0"
    assert "No energy was measured" in text


def test_a_run_without_any_kernel() -> None:
    text = text_of([header(), candidate("a", None, error="build: no")])
    assert "No kernel for w0: none of 1 candidates ran; most often: build: no" in text
    assert "saved" not in text


def test_energies_of_another_plan_are_mentioned() -> None:
    records = [
        header(plan={"window_s": 9}),
        candidate("a", 1e-3, 0.2),
        header(),
        candidate("b", 1e-3, 0.2),
    ]
    assert "earlier runs measured in another way" in text_of(records)
    assert "earlier runs" not in text_of(REAL)


# -- what is simulated is called simulated ---------------------------------------------------------


@pytest.mark.parametrize("objective", ["latency", "energy", "edp"])
def test_simulated_results_begin_with_the_banner(objective: str) -> None:
    first = text_of(two_tasks(), objective).splitlines()[0]
    assert first == "SIMULATED DEVICE sim:a100: no real joules were measured"
    assert first == simulated_banner("sim:a100")
    assert "virtual device time" in text_of(two_tasks(), objective)


def test_measured_results_do_not() -> None:
    assert "SIMULATED" not in text_of(REAL)
    assert "virtual" not in text_of(REAL)


# -- JSON ------------------------------------------------------------------------------------------


def test_json_has_what_scripts_rely_on() -> None:
    values = json.loads(json.dumps(to_json(summarize(two_tasks())), allow_nan=False))
    assert values["simulated"] is True
    assert (values["device"], values["objective"]) == ("sim:a100", "energy:slack=0.05")
    conv, _, broken = values["tasks"]
    assert (conv["name"], conv["weight"]) == ("fused_conv2d_add_relu", 3.0)
    assert (conv["candidates"], conv["energy_measurements"]) == (5, 3)
    assert conv["fastest"] == {
        "key": "a",
        "latency_s": 1e-3,
        "energy_j": 0.2,
        "energy_stderr_j": pytest.approx(0.0002),
        "power_w": pytest.approx(200),
        "measured": True,
        "clock_mhz": None,
    }
    assert conv["best"]["key"] == "b"
    assert (broken["fastest"], broken["best"]) == (None, None)
    assert values["totals"]["best_energy_j"] == pytest.approx(0.4503)


def test_json_of_a_real_device_is_not_simulated() -> None:
    assert to_json(summarize(REAL))["simulated"] is False


# -- hostile logs ----------------------------------------------------------------------------------


def test_names_cannot_steer_the_terminal_or_the_markup() -> None:
    name = "[red]\x1b[2J[/nonsense]"
    text = text_of([header(), TaskRecord(task=name, workload="w0"), candidate("a", 1e-3, 0.2)])
    assert "\x1b" not in text
    assert "[red]?[2J[/nonsense]" in text


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_name_and_any_error_can_be_printed(name: str, error: str) -> None:
    records = [
        header(),
        TaskRecord(task=name, workload="w0"),
        TaskRecord(task=name, workload="w1"),
        candidate("a", 1e-3, 0.2),
        candidate("b", None, error=error, workload="w1"),
    ]
    assert "1.00 ms" in text_of(records, width=80)


# -- pieces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.234e-5, "J", "12.3 µJ"),
        (0.2, "J", "200 mJ"),
        (1.0, "J", "1.00 J"),
        (999.9e-6, "J", "1.00 mJ"),
        (9.994, "J", "9.99 J"),
        (12345.0, "J", "12.3 kJ"),
        (1e-9, "s", "1.00 ns"),
        (1.5e-4, "s", "150 µs"),
        (4321.0, "s", "4320 s"),
        (0.0, "J", "0 J"),
        (1e-15, "J", "1.00 fJ"),
        (math.inf, "J", "inf J"),
    ],
)
def test_quantities_have_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    assert format_quantity(value, unit) == text


@given(st.floats(min_value=1e-15, max_value=1e11))
def test_quantities_are_right_to_three_digits(value: float) -> None:
    number, unit = format_quantity(value, "J").split()
    scale = {"f": 1e-15, "p": 1e-12, "n": 1e-9, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}
    factor = scale[unit[0]] if len(unit) == 2 else 1.0
    assert float(number) * factor == pytest.approx(value, rel=0.0051)
    assert 1 <= float(number) < 1000


@given(st.text(max_size=80), st.integers(min_value=3, max_value=60))
def test_shortened_names_fit_and_keep_both_ends(name: str, width: int) -> None:
    short = shorten(name, width)
    assert len(short) == min(len(name), width)
    assert name.startswith(short.partition("…")[0])
    assert name.endswith(short.rpartition("…")[2]) or "…" in name


def test_printable() -> None:
    assert printable("µ ≈ conv\n\x07") == "µ ≈ conv??"
