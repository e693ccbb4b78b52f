"""Model files from strangers: whatever they hold is refused, or predicts; nothing crashes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_energy.energy_model.base import Sample
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.errors import RecordFormatError

FEATURES = 6


def some_kernels(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    features = rng.random((count, FEATURES))
    features[:, 3] = 1.0  # constant: left out by the model
    return [
        Sample(
            group="task", features=f, latency_s=1e-3 * (1 + f[0]), energy_j=0.1 * (1 + f[1] + f[2])
        )
        for f in features
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "good.json"
    model = XgbKernelModel(rounds=4)
    model.fit(some_kernels(60))
    model.save(path)
    return path.read_text()


def refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(RecordFormatError, match=r"model\.json is not an energy model"):
        XgbKernelModel().load(path)


def test_the_good_file_is_good(good: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(good)
    XgbKernelModel().load(tmp_path / "model.json")
    columns = json.loads(good)["energy"]["columns"]
    assert columns == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "7", '"text"', "{}", "\x80\x04\x95cbuiltins\neval\n", "[" * 100_000]
)
def test_other_texts_are_refused(text: str, tmp_path: Path) -> None:
    refused(tmp_path / "model.json", text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_bytes(b"\x80\x04\xff\xfe")
    with pytest.raises(RecordFormatError):
        XgbKernelModel().load(tmp_path / "model.json")


def test_truncated_files_are_refused(good: str, tmp_path: Path) -> None:
    for part in (0.1, 0.5, 0.99):
        refused(tmp_path / "model.json", good[: int(part * len(good))])


def columns(**changes: list[Any]) -> dict[str, Any]:
    """Two samples as they stand in a file, with one column changed."""
    return {
        "group": ["a", "a"],
        "latency_s": [1.0, 2.0],
        "energy_j": [None, 1.0],
        "features": [[1.0], [2.0]],
    } | changes


def test_samples_as_they_should_be_are_read(good: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(json.loads(good) | {"samples": columns()}))
    model = XgbKernelModel()
    model.load(tmp_path / "model.json")
    assert model.earlier() == model.earlier("a") == 2
    assert model.earlier("b") == 0


@pytest.mark.parametrize(
    "items",
    [
        {"version": 99},
        {"format": "pickle"},
        {"variant": "both"},
        {"energy": "text"},
        {"energy": {}},
        {"latency": {"learner": 1}},
        {"least_s": {"task": 0}},
        {"least_j": {"task": "many"}},
        {"least_j": {}},
        {"typical_w": [1, 2]},
        {"errors": [0.1]},
        {"errors": {"task": [float("nan")]}},
        {"errors": {"task": ["0.1"]}},
        {"errors": {"task": [1e9]}},
        {"seen": [["task", 1.0]]},
        {"prior": "magic"},
        {"origin": 7},
        {"samples": None},
        {"samples": {}},
        {"samples": columns(features=[[1.0], [2.0, 3.0]])},
        {"samples": columns(features=[[1.0]])},
        {"samples": columns(features=[[1.0], [1e300]])},
        {"samples": columns(features=[[1.0], ["2"]])},
        {"samples": columns(features=[[], []])},
        {"samples": columns(latency_s=[1.0, 0.0])},
        {"samples": columns(latency_s=[1.0, True])},
        {"samples": columns(energy_j=[1.0, -1.0])},
        {"samples": columns(group=["a", 7])},
    ],
    ids=str,
)
def test_wrong_values_are_refused(good: str, items: dict[str, Any], tmp_path: Path) -> None:
    refused(tmp_path / "model.json", json.dumps(json.loads(good) | items))


def node(name: str, index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change one node of the first tree."""

    def change(model: dict[str, Any]) -> None:
        booster(model)["model"]["trees"][0][name][index] = value

    return change


def booster(model: dict[str, Any]) -> dict[str, Any]:
    return model["energy"]["booster"]["learner"]["gradient_booster"]


def tree(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(model: dict[str, Any]) -> None:
        booster(model)["model"]["trees"][0][name] = value

    return change


def tree_parameter(name: str, value: str) -> Callable[[dict[str, Any]], None]:
    def change(model: dict[str, Any]) -> None:
        booster(model)["model"]["trees"][0]["tree_param"][name] = value

    return change


#: Most of these end xgboost 3.2 with a segmentation fault.
ATTACKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "child far away": node("left_children", 0, 10**6),
    "child negative": node("left_children", 0, -7),
    "child beyond integers": node("left_children", 0, 2**70),
    "child is a fraction": node("left_children", 0, 1.5),
    "loop to itself": node("left_children", 0, 0),
    "loop to the root": node("right_children", 1, 0),
    "both children the same": node("right_children", 0, 1),
    "parent far away": node("parents", 1, 10**6),
    "feature far away": node("split_indices", 0, 10**8),
    "feature negative": node("split_indices", 0, -5),
    "feature is true": node("split_indices", 0, True),
    "category split": node("split_type", 0, 1),
    "leaf is not a number": node("base_weights", 0, float("nan")),
    "threshold infinite": node("split_conditions", 0, float("inf")),
    "children cut": tree("left_children", [1, -1]),
    "categories": tree("categories", [1]),
    "more nodes": tree_parameter("num_nodes", "1000000"),
    "leaf vectors": tree_parameter("size_leaf_vector", "50"),
    "deleted nodes": tree_parameter("num_deleted", "3"),
    "other booster": lambda model: booster(model).__setitem__("name", "gblinear"),
    "more trees": lambda model: booster(model)["model"]["gbtree_model_param"].__setitem__(
        "num_trees", "100"
    ),
    "no trees": lambda model: booster(model)["model"].__setitem__("trees", []),
    "tree of another class": lambda model: booster(model)["model"].__setitem__(
        "tree_info", [9] * 4
    ),
    "fewer features": lambda model: model["energy"]["booster"]["learner"][
        "learner_model_param"
    ].__setitem__("num_feature", "1"),
    "columns far away": lambda model: model["energy"].__setitem__("columns", [0, 1, 2, 4, 999]),
    "columns negative": lambda model: model["energy"].__setitem__("columns", [-1, 1, 2, 4, 5]),
    "columns missing": lambda model: model["energy"].__setitem__("columns", [0, 1]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_trees_that_would_crash_xgboost_are_refused(good: str, attack: str, tmp_path: Path) -> None:
    model = json.loads(good)
    ATTACKS[attack](model)
    refused(tmp_path / "model.json", json.dumps(model))


def places(value: Any, rng: random.Random, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths into a JSON value; of long lists, a few elements."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], rng, (*path, key))
    elif isinstance(value, list):
        for index in rng.sample(range(len(value)), min(3, len(value))):
            found += places(value[index], rng, (*path, index))
    return found


VALUES = (0, -1, 1, 10**9, 2**40, 1e308, "x", "1", "-5", "99999999", None, [], {}, True, [0], 1.5)


def test_random_edits_are_refused_or_predict(good: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "model.json"
    features = np.stack([sample.features for sample in some_kernels(10)])
    original, outcomes = json.loads(good), {"refused": 0, "predicts": 0}
    for _ in range(150):
        edited = copy.deepcopy(original)
        *way, last = rng.choice(places(edited, rng))
        target = edited
        for step in way:
            target = target[step]
        target[last] = rng.choice(VALUES)
        path.write_text(json.dumps(edited))
        model = XgbKernelModel()
        try:
            model.load(path)
        except RecordFormatError:
            outcomes["refused"] += 1
            continue
        for latency_s in (None, np.full(10, 1e-3)):
            prediction = model.predict(features, "task", latency_s)
            if prediction is not None and prediction.energy_j is not None:
                assert np.isfinite(prediction.energy_j).all()
        outcomes["predicts"] += 1
    assert outcomes["refused"] > 100


def test_a_refused_file_leaves_the_model_as_it_was(good: str, tmp_path: Path) -> None:
    model = XgbKernelModel()
    model.fit(some_kernels(60))
    features = np.stack([sample.features for sample in some_kernels(10)])
    before = model.predict(features, "task")
    broken = json.loads(good)
    ATTACKS["loop to itself"](broken)
    (tmp_path / "model.json").write_text(json.dumps(broken))
    with pytest.raises(RecordFormatError):
        model.load(tmp_path / "model.json")
    after = model.predict(features, "task")
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(before.energy_j, after.energy_j)
