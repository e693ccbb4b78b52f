from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from tvm_energy.energy_model.base import Prediction, Sample
from tvm_energy.energy_model.xgb import Variant, XgbKernelModel

VARIANTS: list[Variant] = ["factored", "direct"]


def kernels(
    count: int, seed: int, group: str = "task", scale: float = 1.0, noise: float = 0.0
) -> list[Sample]:
    """Kernels whose latency and power are smooth functions of a few features."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 10, size=(count, 12))
    latency_s = scale * 1e-4 * np.exp(0.2 * features[:, 0] + 0.1 * features[:, 1])
    power_w = 100 + 15 * features[:, 2] + 5 * features[:, 3]
    energy_j = latency_s * power_w * np.exp(noise * rng.standard_normal(count))
    return [
        Sample(group=group, features=f, latency_s=float(t), energy_j=float(e))
        for f, t, e in zip(features, latency_s, energy_j, strict=True)
    ]


def energies(samples: list[Sample]) -> np.ndarray:
    return np.array([sample.energy_j for sample in samples])


def stacked(samples: list[Sample]) -> np.ndarray:
    return np.stack([sample.features for sample in samples])


def latencies(samples: list[Sample]) -> np.ndarray:
    return np.array([sample.latency_s for sample in samples])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_function_is_recovered(variant: Variant) -> None:
    model = XgbKernelModel(variant)
    model.fit(kernels(400, seed=1))
    test = kernels(200, seed=2)
    known = model.predict(stacked(test), "task", latencies(test))
    unknown = model.predict(stacked(test), "task")
    assert known is not None
    assert unknown is not None
    assert spearmanr(known.energy_j, energies(test)).statistic > 0.9
    assert spearmanr(unknown.energy_j, energies(test)).statistic > 0.85
    assert spearmanr(unknown.latency_s, latencies(test)).statistic > 0.9


def test_factored_profits_from_the_measured_latency() -> None:
    train, test = kernels(60, seed=1), kernels(200, seed=2)
    errors = {}
    for variant in VARIANTS:
        model = XgbKernelModel(variant)
        model.fit(train)
        prediction = model.predict(stacked(test), "task", latencies(test))
        assert prediction is not None
        errors[variant] = np.median(np.abs(prediction.energy_j / energies(test) - 1))
    assert errors["factored"] < 0.5 * errors["direct"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tasks_of_other_scale_do_not_disturb(variant: Variant) -> None:
    alone, both = XgbKernelModel(variant), XgbKernelModel(variant)
    small, large = kernels(200, seed=1), kernels(200, seed=3, group="large", scale=1000.0)
    alone.fit(small)
    both.fit(small + large)
    test = kernels(100, seed=2)
    for latency_s in (latencies(test), None):
        errors = []
        for model in (alone, both):
            prediction = model.predict(stacked(test), "task", latency_s)
            assert prediction is not None
            errors.append(np.median(np.abs(prediction.energy_j / energies(test) - 1)))
        assert errors[1] < errors[0] + 0.05
    slow = both.predict(stacked(test), "large")
    assert slow is not None
    assert np.median(slow.latency_s / latencies(test)) == pytest.approx(1000, rel=0.2)


def test_weights_favour_low_energy() -> None:
    """Two kernels with the same features: the model believes the cheaper one."""
    features = np.ones(4)
    samples = [
        Sample(group="t", features=features, latency_s=1e-3, energy_j=1.0 if i % 2 else 3.0)
        for i in range(200)
    ]
    model = XgbKernelModel("direct", rounds=200)
    model.fit(samples)
    prediction = model.predict(features[None], "t", np.array([1e-3]))
    assert prediction is not None
    assert prediction.energy_j is not None
    # Weights 1 and 1/3: log E = (0 * 1 + log 3 * 1/3) / (4/3), a quarter of log 3.
    assert prediction.energy_j[0] == pytest.approx(3**0.25, rel=0.05)


def test_errors_are_those_of_kernels_not_seen() -> None:
    model = XgbKernelModel(seed=1)
    for batch in range(6):
        model.fit([s for n in range(batch + 1) for s in kernels(32, seed=n, noise=0.1)])
    # The truth scatters by 10 %; a model that judged itself on its training data would claim less.
    assert 0.08 < model.relative_error < 0.25
    assert model.relative_search_error > model.relative_error


@pytest.mark.parametrize("variant", VARIANTS)
def test_errors_of_the_first_batch_are_cross_validated(variant: Variant) -> None:
    model = XgbKernelModel(variant)
    model.fit(kernels(64, seed=1, noise=0.1))
    test = kernels(400, seed=2, noise=0.1)
    for latency_s, claimed in (
        (latencies(test), model.relative_error),
        (None, model.relative_search_error),
    ):
        prediction = model.predict(stacked(test), "task", latency_s)
        assert prediction is not None
        truth = float(np.sqrt(np.mean((prediction.energy_j / energies(test) - 1) ** 2)))
        assert 0.6 * truth < claimed < 1.8 * truth
        np.testing.assert_allclose(prediction.energy_stderr_j, claimed * prediction.energy_j)


def test_unknown_and_unmeasured() -> None:
    model = XgbKernelModel()
    assert model.predict(np.zeros((3, 4)), "task") is None
    model.fit([])
    samples = [
        Sample(group="t", features=np.array([float(i)]), latency_s=1e-3 + 1e-5 * i)
        for i in range(20)
    ]
    model.fit(samples[:1])
    assert model.predict(np.zeros((1, 1)), "t") is None
    model.fit(samples)
    prediction = model.predict(np.zeros((2, 1)), "t")
    assert prediction is not None
    assert prediction.energy_j is None
    assert prediction.latency_s.shape == (2,)
    assert model.predict(np.zeros((2, 1)), "other task") is None


def test_constant_energy_is_predicted_as_such() -> None:
    rng = np.random.default_rng(0)
    samples = [
        Sample(group="t", features=rng.random(3), latency_s=1e-3, energy_j=0.5) for _ in range(30)
    ]
    model = XgbKernelModel()
    model.fit(samples)
    prediction = model.predict(rng.random((5, 3)), "t", np.full(5, 1e-3))
    assert prediction is not None
    assert prediction.energy_j == pytest.approx(np.full(5, 0.5), rel=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_seed_gives_the_same_predictions(variant: Variant) -> None:
    test = stacked(kernels(20, seed=5))
    results = []
    for _ in range(2):
        model = XgbKernelModel(variant, seed=7)
        model.fit(kernels(100, seed=1))
        prediction = model.predict(test, "task")
        assert prediction is not None
        results.append(prediction.energy_j)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_loaded_models_predict_the_same(variant: Variant, tmp_path: Path) -> None:
    model = XgbKernelModel(variant)
    for seed in (1, 2):
        model.fit(kernels(100, seed=seed))
    model.save(tmp_path / "model.json")
    other = XgbKernelModel()
    other.load(tmp_path / "model.json")
    test = stacked(kernels(20, seed=5))
    ours, theirs = model.predict(test, "task"), other.predict(test, "task")
    assert ours is not None
    assert theirs is not None
    np.testing.assert_array_equal(ours.energy_j, theirs.energy_j)
    np.testing.assert_array_equal(ours.energy_stderr_j, theirs.energy_stderr_j)


def test_an_empty_model_survives_saving(tmp_path: Path) -> None:
    XgbKernelModel().save(tmp_path / "model.json")
    model = XgbKernelModel()
    model.load(tmp_path / "model.json")
    assert model.predict(np.zeros((1, 1)), "task") is None


def test_nothing_is_left_of_an_interrupted_save(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    XgbKernelModel().save(path)
    XgbKernelModel().save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_loading_does_not_flatter_the_errors(tmp_path: Path) -> None:
    """Samples that a saved model learned from tell nothing about kernels it has not seen."""
    model = XgbKernelModel()
    samples = kernels(100, seed=1, noise=0.2)
    model.fit(samples)
    model.fit(samples + kernels(40, seed=2, noise=0.2))
    model.save(tmp_path / "model.json")
    other = XgbKernelModel()
    other.load(tmp_path / "model.json")
    other.fit(samples + kernels(40, seed=2, noise=0.2))
    assert other.relative_error == model.relative_error


def test_other_features_than_learned_are_refused() -> None:
    model = XgbKernelModel()
    model.fit(kernels(20, seed=1))
    with pytest.raises(ValueError, match="learned from 12 features, got 11"):
        model.predict(np.zeros((2, 11)), "task")


def test_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="'both'"):
        XgbKernelModel("both")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_intervals_hold_what_they_promise(level: float) -> None:
    model = XgbKernelModel()
    known = kernels(200, seed=1, noise=0.1)
    model.fit(known)
    for seed in range(2, 6):
        known = known + kernels(40, seed=seed, noise=0.1)
        model.fit(known)
    test = kernels(1000, seed=9, noise=0.1)
    prediction = model.predict(stacked(test), "task", latencies(test))
    assert prediction is not None
    low_j, high_j = prediction.interval(level)
    inside = np.mean((low_j <= energies(test)) & (energies(test) <= high_j))
    # 64 errors are remembered: an order statistic of so few is off by about 0.05.
    assert abs(inside - level) < 0.1


def test_interval_ends_are_order_statistics() -> None:
    prediction = Prediction(
        latency_s=np.ones(1),
        energy_j=np.array([2.0]),
        energy_stderr_j=np.array([0.2]),
        energy_scores=np.arange(1.0, 20.0),  # 19 of them
    )
    low_j, high_j = prediction.interval(0.9)  # (19 + 1) * 0.05 = 1: the least and the largest
    np.testing.assert_allclose([low_j, high_j], 2 * np.exp([[0.1], [1.9]]))
    low_j, high_j = prediction.interval(0.95)  # too few: the normal distribution's 1.96
    np.testing.assert_allclose([low_j, high_j], 2 * np.exp([[-0.196], [0.196]]), rtol=1e-4)
    with pytest.raises(ValueError, match="between 0 and 1"):
        prediction.interval(1.0)
    with pytest.raises(ValueError, match="no energy"):
        Prediction(latency_s=np.ones(1)).interval(0.9)


def test_errors_are_kept_for_each_task() -> None:
    model = XgbKernelModel()
    known = kernels(80, seed=1) + kernels(80, seed=2, group="noisy", noise=0.5)
    model.fit(known)
    for seed in (3, 4):
        known = known + kernels(40, seed=seed) + kernels(40, seed=seed, group="noisy", noise=0.5)
        model.fit(known)
    test = kernels(5, seed=9)
    spread = {}
    for group in ("task", "noisy"):
        prediction = model.predict(stacked(test), group, latencies(test))
        assert prediction is not None
        assert prediction.energy_stderr_j is not None
        spread[group] = float(np.mean(prediction.energy_stderr_j / prediction.energy_j))
    assert spread["noisy"] > 2 * spread["task"]


def test_many_samples_leave_the_good_kernels_known() -> None:
    """Only some of 4,000 are learned from; of the good ones that is enough."""
    test = kernels(200, seed=2)
    best = np.argsort(energies(test))[:20]
    errors = []
    for count in (400, 4000):
        model = XgbKernelModel()
        model.fit(kernels(count, seed=1))
        prediction = model.predict(stacked(test), "task", latencies(test))
        assert prediction is not None
        assert prediction.energy_j is not None
        errors.append(np.mean(np.abs(prediction.energy_j / energies(test) - 1)[best]))
    assert errors[1] < errors[0]
