"""A model that begins with what an earlier run learned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.xgb import Variant, XgbKernelModel

VARIANTS: list[Variant] = ["factored", "direct"]


def kernels(count: int, seed: int, group: str, scale: float = 1.0) -> list[Sample]:
    """Latency and power are the same functions of the features in every task, up to a scale."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 10, size=(count, 12))
    latency_s = scale * 1e-4 * np.exp(0.2 * features[:, 0] + 0.1 * features[:, 1])
    power_w = 100 + 15 * features[:, 2] + 5 * features[:, 3]
    return [
        Sample(group=group, features=f, latency_s=float(t), energy_j=float(t * p))
        for f, t, p in zip(features, latency_s, power_w, strict=True)
    ]


def columns(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.stack([sample.features for sample in samples]),
        np.array([sample.latency_s for sample in samples]),
        np.array([sample.energy_j for sample in samples]),
    )


def earlier(tmp_path: Path, variant: Variant = "factored") -> XgbKernelModel:
    """Of a run with two tasks, as its file gives it."""
    model = XgbKernelModel(variant, origin={"run": "first"})
    model.fit(kernels(200, 1, "a") + kernels(200, 2, "b", scale=30))
    model.save(tmp_path / "model.json")
    loaded = XgbKernelModel()
    loaded.load(tmp_path / "model.json")
    return loaded


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_task_of_the_earlier_run_is_predicted_at_once(variant: Variant, tmp_path: Path) -> None:
    features, latency_s, energy_j = columns(kernels(100, 3, "b", scale=30))
    model = XgbKernelModel(variant)
    assert model.predict(features, "b") is None
    model.adopt(earlier(tmp_path))
    assert (model.earlier(), model.earlier("b"), model.earlier("new")) == (400, 200, 0)
    foreseen = model.predict(features, "b")
    known = model.predict(features, "b", latency_s)
    assert foreseen is not None
    assert known is not None
    assert known.energy_j is not None
    assert spearmanr(foreseen.energy_j, energy_j).statistic > 0.8
    # The scale of "a" would be 30 times off.
    assert np.median(np.abs(known.energy_j / energy_j - 1)) < 0.3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_task_profits_once_its_first_kernels_have_run(
    variant: Variant, tmp_path: Path
) -> None:
    model = XgbKernelModel(variant)
    model.adopt(earlier(tmp_path))
    features, latency_s, energy_j = columns(kernels(100, 3, "new", scale=5))
    assert model.predict(features, "new") is None
    assert model.predict(features, "new", latency_s) is None
    few = kernels(16, 4, "new", scale=5)
    alone = XgbKernelModel(variant)
    errors = {}
    for name, learner in (("adopted", model), ("alone", alone)):
        learner.fit(few)
        prediction = learner.predict(features, "new", latency_s)
        assert prediction is not None
        assert prediction.energy_j is not None
        logs = np.log(prediction.energy_j / energy_j)
        errors[name] = np.std(logs)
    assert errors["adopted"] < 0.75 * errors["alone"]


def test_what_was_adopted_is_not_forgotten_by_a_refit_nor_by_a_file(tmp_path: Path) -> None:
    model = XgbKernelModel()
    model.adopt(earlier(tmp_path))
    for count in (16, 32, 48):
        model.fit(kernels(count, 10, "new"))
    model.save(tmp_path / "second.json")
    third = XgbKernelModel()
    third.load(tmp_path / "second.json")
    assert third.earlier() == 448
    groups = json.loads((tmp_path / "second.json").read_text())["samples"]["group"]
    assert set(groups) == {"a", "b", "new"}


def test_a_file_keeps_few_samples_those_with_energy_first(tmp_path: Path) -> None:
    model = XgbKernelModel(rounds=4)
    measured = kernels(100, 1, "a")
    timed = [
        Sample(group="a", features=s.features, latency_s=s.latency_s) for s in kernels(3000, 2, "a")
    ]
    model.fit(timed + measured)
    model.save(tmp_path / "model.json")
    samples = json.loads((tmp_path / "model.json").read_text())["samples"]
    assert len(samples["group"]) == 768
    assert sum(energy_j is not None for energy_j in samples["energy_j"]) == 100
    # Fast kernels are likelier to be kept.
    kept = [t for t, e in zip(samples["latency_s"], samples["energy_j"], strict=True) if e is None]
    assert np.median(kept) < np.median([sample.latency_s for sample in timed])


def test_energies_measured_in_another_way_are_left_out(tmp_path: Path) -> None:
    model = XgbKernelModel()
    model.adopt(earlier(tmp_path), energies=False)
    foreseen = model.predict(columns(kernels(10, 3, "a"))[0], "a")
    assert foreseen is not None
    assert foreseen.energy_j is None
    assert model.relative_error == XgbKernelModel().relative_error


def test_where_it_is_from_is_kept(tmp_path: Path) -> None:
    assert earlier(tmp_path).origin == {"run": "first"}
