"""Counts times published energies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.prior import PRIOR_NAMES, prior_columns
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import ConfigurationError
from tvm_energy.features import VECTOR_LENGTH, feature_names

AT = {name: index for index, name in enumerate(feature_names())}


def kernel(**counts: float) -> np.ndarray:
    """Pooled features of a kernel with these totals; the rest are zero."""
    features = np.zeros(VECTOR_LENGTH)
    for name, count in counts.items():
        features[AT[f"total_{name}"]] = np.log2(1 + count)
    return features


def picojoules(features: np.ndarray) -> dict[str, float]:
    values = 2 ** prior_columns(features[None])[0] - 1
    return dict(zip(PRIOR_NAMES, values, strict=True))


def test_each_count_costs_its_published_energy() -> None:
    parts = picojoules(
        kernel(
            float_mad=1000,
            int_add_sub=100,
            buffer0_bytes=80,
            buffer1_bytes=80,
            buffer0_lines=3,
            buffer4_unique_bytes=8,
        )
    )
    assert parts["prior_arithmetic"] == pytest.approx(1000 * (0.9 + 3.7) + 100 * 0.1)
    products = picojoules(kernel(float_mul=10, float_add_sub=10, int_mul=10, float_div_mod=10))
    assert products["prior_arithmetic"] == pytest.approx(10 * (3.7 + 0.9 + 3.1 + 7.1 * 3.7))
    assert parts["prior_near"] == pytest.approx(160 * 10 / 8)
    assert parts["prior_cache"] == pytest.approx(3 * 64 * 100 / 8)
    assert parts["prior_dram"] == pytest.approx(1950)
    assert parts["prior_total"] == pytest.approx(
        sum(value for name, value in parts.items() if name != "prior_total")
    )


def test_nothing_costs_nothing_and_huge_counts_stay_finite() -> None:
    assert not prior_columns(np.zeros((2, VECTOR_LENGTH))).any()
    assert np.isfinite(prior_columns(np.full((1, VECTOR_LENGTH), 1e6))).all()
    assert prior_columns(np.zeros((0, VECTOR_LENGTH))).shape == (0, len(PRIOR_NAMES))


def test_features_without_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="333 pooled features, got 6"):
        prior_columns(np.zeros((1, 6)))


def memory_bound(count: int, seed: int) -> list[Sample]:
    """Kernels whose power is what the sum of five buffers' traffic costs: no single feature tells it."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        counts = {f"buffer{at}_unique_bytes": float(2 ** rng.uniform(4, 12)) for at in range(5)}
        features = kernel(**counts)
        samples.append(
            Sample(group="t", features=features, latency_s=1e-3, energy_j=sum(counts.values()))
        )
    return samples


def test_the_prior_helps_where_physics_adds_up() -> None:
    test = memory_bound(200, 1)
    features = np.stack([sample.features for sample in test])
    energy_j = np.array([sample.energy_j for sample in test])
    errors = {}
    for prior in ("none", "counts"):
        model = XgbKernelModel(prior=prior)
        model.fit(memory_bound(60, 2))
        prediction = model.predict(features, "t", np.full(200, 1e-3))
        assert prediction is not None
        assert prediction.energy_j is not None
        errors[prior] = np.median(np.abs(np.log(prediction.energy_j / energy_j)))
    assert errors["counts"] < 0.7 * errors["none"]


def test_a_file_remembers_the_prior(tmp_path: Path) -> None:
    model = XgbKernelModel(prior="counts", rounds=4)
    model.fit(memory_bound(40, 1))
    model.save(tmp_path / "model.json")
    loaded = XgbKernelModel()
    loaded.load(tmp_path / "model.json")
    features = np.stack([sample.features for sample in memory_bound(5, 2)])
    both = [each.predict(features, "t") for each in (model, loaded)]
    assert loaded.prior == "counts"
    np.testing.assert_allclose(both[0].latency_s, both[1].latency_s)
    np.testing.assert_allclose(both[0].energy_j, both[1].energy_j)
    # A run without the prior can begin with what one with it learned.
    without = XgbKernelModel()
    without.adopt(loaded)
    assert without.prior == "none"
    assert without.predict(features, "t") is not None


def test_an_unknown_prior_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown prior 'magic'; known are none, counts"):
        XgbKernelModel(prior="magic")  # type: ignore[arg-type]
