"""Fits recover what made the data, refuse what the data cannot say, and hold the published anchors."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tvm_energy.dvfs.fitting import (
    find_caps,
    fit_latencies,
    fit_latency,
    fit_power,
    fit_powers,
    supported_forms,
)
from tvm_energy.dvfs.forms import LATENCY_FORMS, POWER_FORMS, ridge_voltage
from tvm_energy.dvfs.joint import fit_joint_latency, fit_joint_power
from tvm_energy.errors import ConfigurationError

DATA = Path(__file__).parent.parent / "data" / "dvfs"
CLOCKS = np.linspace(300.0, 1800.0, 11)


def kernel_tuner(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clock, latency, power of the A100 table of Kernel Tuner's tutorial."""
    raw = (DATA / "kernel_tuner" / name).read_bytes()
    rows = json.loads(lzma.decompress(raw) if name.endswith(".xz") else raw)["cache"].values()
    columns = np.array([(r["core_freq"], r["time"] / 1e3, r["nvml_power"]) for r in rows])
    return tuple(columns[np.argsort(columns[:, 0])].T)


# ---- latency --------------------------------------------------------------------------------------


@given(a=st.floats(1e-3, 10), c=st.floats(0, 1e-2))
@settings(max_examples=30, deadline=None)
def test_offset_is_recovered(a: float, c: float) -> None:
    curve = fit_latency(CLOCKS, a / CLOCKS + c, form="offset")
    assert curve.coefficients["a"] == pytest.approx(a, rel=1e-6)
    assert curve.coefficients["c"] == pytest.approx(c, rel=1e-6, abs=1e-9)


@given(b=st.floats(0.5, 2.5), share=st.floats(0, 3))
@example(b=2.0, share=3.0)  # flat at its upper end, yet no cap
@settings(max_examples=20, deadline=None)
def test_the_power_law_predicts_between_and_recovers_its_exponent(b: float, share: float) -> None:
    at = lambda f: (f / 1000) ** -b + share  # noqa: E731
    curve = fit_latency(CLOCKS, at(CLOCKS), form="power")
    between = (CLOCKS[1:] + CLOCKS[:-1]) / 2
    assert curve.predict(between) == pytest.approx(at(between), rel=2e-3)
    assert curve.coefficients["b"] == pytest.approx(b, abs=0.05)


@given(shift=st.floats(-300, 250), share=st.floats(0, 3))
@settings(max_examples=20, deadline=None)
def test_the_shifted_form_predicts_between(shift: float, share: float) -> None:
    at = lambda f: 1000 / (f - shift) + share  # noqa: E731
    curve = fit_latency(CLOCKS, at(CLOCKS), form="shifted")
    between = (CLOCKS[1:] + CLOCKS[:-1]) / 2
    assert curve.predict(between) == pytest.approx(at(between), rel=2e-3)


@given(seconds=st.floats(1e-7, 1e4), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_a_fit_scales_with_the_unit_of_time(seconds: float, seed: int) -> None:
    t = (400 / CLOCKS + 1) * np.exp(0.01 * np.random.default_rng(seed).standard_normal(11))
    one, other = fit_latency(CLOCKS, t), fit_latency(CLOCKS, seconds * t)
    assert one.form == other.form
    assert other.predict(CLOCKS) == pytest.approx(seconds * one.predict(CLOCKS), rel=1e-6)


@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_coefficients_are_never_negative(seed: int) -> None:
    t = np.random.default_rng(seed).uniform(0.1, 1, 6)
    for form in LATENCY_FORMS:
        curve = fit_latency(CLOCKS[:6], t, form=form)
        assert curve.coefficients["a"] >= 0
        assert curve.coefficients.get("c", 0) >= 0
        assert np.all(np.isfinite(curve.half_width(CLOCKS)))


def test_the_simplest_form_that_predicts_as_well_is_chosen() -> None:
    assert fit_latency(CLOCKS, 5 / CLOCKS).form == "cpu"
    assert fit_latency(CLOCKS, 5 / CLOCKS + 0.01).form == "offset"
    assert fit_power(CLOCKS, 1e-8 * CLOCKS**3).form == "cubic"
    assert fit_power(CLOCKS, 1e-8 * CLOCKS**3 + 40).form == "static"


def test_the_order_of_the_clocks_does_not_matter() -> None:
    t = 5 / CLOCKS + 0.01
    back = fit_latency(CLOCKS[::-1], t[::-1])
    assert back.coefficients == fit_latency(CLOCKS, t).coefficients


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    t = (5 / CLOCKS + 0.01) * (1 + 0.01 * rng.standard_normal((200, len(CLOCKS))))
    inside = 0
    for curve in fit_latencies(CLOCKS, t, form="offset", cap_mhz=np.inf):
        low, high = curve.intervals()["c"]
        inside += low <= 0.01 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_fewer_points_widen_the_interval() -> None:
    rng = np.random.default_rng(3)
    t = (5 / CLOCKS + 0.01) * (1 + 0.01 * rng.standard_normal(11))
    few = fit_latency(CLOCKS[[0, 5, 10]], t[[0, 5, 10]], form="offset")
    many = fit_latency(CLOCKS, t, form="offset")
    width = lambda curve: np.subtract(*reversed(curve.intervals()["a"]))  # noqa: E731
    assert width(few) > width(many)


# ---- what the data cannot say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clocks", "values", "message"),
    [
        ([1000], [1.0], "one clock"),
        ([], [], "one clock"),
        ([1000, 1000], [1.0, 1.1], "there twice"),
        ([1000, 1200], [1.0, 0.0], "must be positive"),
        ([1000, -5], [1.0, 1.0], "must be positive"),
        ([1000, 1200], [1.0, float("nan")], "must be positive"),
        ([1000, 1200, 1400], [1.0, 2.0], "does not belong"),
    ],
)
def test_what_is_no_curve_is_refused(
    clocks: list[float], values: list[float], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_latency(clocks, values)


def test_a_form_with_too_few_clocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs 4 different effective clocks"):
        fit_latency([500, 1000, 1500], [3, 2, 1], form="shifted")
    with pytest.raises(ConfigurationError, match="unknown form"):
        fit_latency(CLOCKS, 1 / CLOCKS, form="quadratic")


def test_two_clocks_give_the_one_parameter_form_only() -> None:
    assert supported_forms(2, LATENCY_FORMS) == ["cpu"]
    assert fit_latency([500, 1000], [2, 1]).form == "cpu"
    assert "ridge" not in supported_forms(4, POWER_FORMS)
    assert "ridge" in supported_forms(5, POWER_FORMS)


def test_latency_that_rises_with_the_clock_is_not_bent_into_a_fall() -> None:
    curve = fit_latency(CLOCKS, 1 + CLOCKS / 1e4, form="offset")
    assert curve.coefficients["a"] == 0
    assert curve.rms > 0.02


# ---- the cap --------------------------------------------------------------------------------------


def test_a_flat_end_is_a_cap_and_bends_no_coefficient() -> None:
    f = np.linspace(900, 1500, 13)
    t = 300 / np.minimum(f, 1290) + 0.05
    curve = fit_latency(f, t)
    assert curve.cap_mhz == pytest.approx(1290, abs=8)
    assert curve.form == "offset"
    assert curve.coefficients["a"] == pytest.approx(300, rel=0.01)
    assert curve.predict(1500.0) == pytest.approx(t[-1], rel=1e-3)
    assert curve.effective_mhz(1500.0) == curve.cap_mhz


def test_power_at_the_limit_marks_the_cap_even_with_one_point_above() -> None:
    f = np.array([600.0, 800, 1000, 1200, 1400])
    t = 300 / np.minimum(f, 1250) + 0.05
    p = np.minimum(0.2 * np.minimum(f, 1250), 250.0)
    assert np.isinf(find_caps(f, t[None], None, None))[0]
    cap = find_caps(f, t[None], p[None], 250.0)[0]
    assert 1200 < cap < 1400
    power = fit_power(f, p, cap_mhz=float(cap))
    assert power.predict(1400.0) == power.predict(1399.0)


def test_an_unlimited_curve_has_no_cap() -> None:
    rng = np.random.default_rng(0)
    t = (5 / CLOCKS + 0.01) * (1 + 0.003 * rng.standard_normal((100, 11)))
    assert np.isinf(find_caps(CLOCKS, t, None, None)).mean() > 0.95


# ---- power ----------------------------------------------------------------------------------------


def test_the_ridge_is_recovered_and_shared_by_workloads() -> None:
    idle, alpha = np.array([[30.0], [50.0], [40.0]]), np.array([[0.05], [0.08], [0.02]])
    p = idle + alpha * CLOCKS * ridge_voltage(CLOCKS, 1200.0, 0.8) ** 2
    for curve in fit_powers(CLOCKS, p, form="ridge"):
        assert curve.coefficients["ridge"] == pytest.approx(1200, abs=5)
        assert curve.coefficients["beta"] == pytest.approx(0.8, abs=0.02)
    few = [0, 5, 7, 10]
    for curve, true in zip(fit_powers(CLOCKS[few], p[:, few], form="ridge"), p, strict=True):
        assert curve.predict(CLOCKS) == pytest.approx(true, rel=0.02)


def test_the_published_a100_table_has_its_ridge_near_1025_mhz() -> None:
    f, _, p = kernel_tuner("synthetic_fp32_cache_NVIDIA_A100-PCIE-40GB_10freq.json")
    assert dict(zip(f, np.round(p, 1), strict=True))[1410] == 153.4
    curve = fit_power(f, p, form="ridge")
    assert 950 <= curve.coefficients["ridge"] <= 1100
    assert np.abs(curve.predict(f) / p - 1).max() < 0.05
    cubic = fit_power(f, p, form="cubic")
    assert np.abs(cubic.predict(f) / p - 1).max() > 0.5


# ---- both clocks ----------------------------------------------------------------------------------


@given(a=st.floats(0.1, 10), b=st.floats(0.1, 10), c=st.floats(0, 0.01))
@settings(max_examples=20, deadline=None)
def test_joint_latency_is_recovered(a: float, b: float, c: float) -> None:
    core, memory = (grid.ravel() for grid in np.meshgrid([500.0, 800, 1100], [800.0, 3500]))
    fit = fit_joint_latency(core, memory, a / core + b / memory + c)
    assert fit.predict(650, 2000) == pytest.approx(a / 650 + b / 2000 + c, rel=1e-6)


def test_joint_fits_refuse_one_memory_clock() -> None:
    with pytest.raises(ConfigurationError, match="1 memory clocks"):
        fit_joint_power([500, 600, 700, 800], [800] * 4, [1, 2, 3, 4])
