"""Boosters to and from JSON, safe to read from a stranger.

xgboost trusts the trees in a model file: a child or feature index out of range, or a loop, makes it
read wild memory, and the process dies (seen with xgboost 3.2). So every tree is checked here before
xgboost sees it, and what our models never use (other boosters, categories, vector leaves, several
targets) is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_energy.energy_model.compat import xgboost

#: xgboost's mark for the parent of a root.
_NO_PARENT = 2**31 - 1

_PER_NODE_INTEGERS = ("left_children", "right_children", "parents", "split_indices")
_PER_NODE_FLAGS = ("default_left", "split_type")
_PER_NODE_NUMBERS = ("base_weights", "loss_changes", "split_conditions", "sum_hessian")
_CATEGORIES = ("categories", "categories_nodes", "categories_segments", "categories_sizes")

#: No float32 is larger.
_LARGEST = 3.5e38


def booster_to_json(booster: xgboost.Booster) -> Any:
    """The booster as JSON values, in xgboost's own format."""
    return json.loads(booster.save_raw("json").decode())


def booster_from_json(values: Any) -> xgboost.Booster:
    """The inverse of `booster_to_json`, for files from anywhere.

    Raises:
        ValueError: what is wrong with it.
        xgboost.core.XGBoostError: xgboost refuses it.
    """
    try:
        check_booster(values)
    except (AttributeError, KeyError, TypeError, IndexError) as exc:
        raise ValueError(f"broken booster: {type(exc).__name__}: {exc}") from exc
    booster = xgboost.Booster()
    booster.load_model(bytearray(json.dumps(values, allow_nan=False).encode()))
    return booster


def check_booster(values: Any) -> None:
    """Raise unless this is a booster of regression trees that xgboost can walk safely."""
    learner = values["learner"]
    parameters = learner["learner_model_param"]
    _require(learner["objective"]["name"] == "reg:squarederror", "the objective")
    _require(learner["gradient_booster"]["name"] == "gbtree", "the kind of booster")
    _require(int(parameters["num_class"]) == 0, "num_class")
    _require(int(parameters.get("num_target", 1)) == 1, "num_target")
    _require(
        not learner["feature_names"] and not learner["feature_types"], "feature names or types"
    )
    features = int(parameters["num_feature"])
    _require(0 < features < 2**16, "num_feature")

    model = learner["gradient_booster"]["model"]
    trees = model["trees"]
    _require(isinstance(trees, list) and 0 < len(trees) < 2**16, "the number of trees")
    _require(int(model["gbtree_model_param"]["num_trees"]) == len(trees), "num_trees")
    _require(int(model["gbtree_model_param"]["num_parallel_tree"]) == 1, "num_parallel_tree")
    _require(model["tree_info"] == [0] * len(trees), "tree_info")
    _require(
        model.get("iteration_indptr", []) in ([], list(range(len(trees) + 1))), "iteration_indptr"
    )
    _require(not any(dict(model.get("cats", {})).values()), "categories")
    for number, tree in enumerate(trees):
        _require(tree["id"] == number, f"the id of tree {number}")
        _check_tree(tree, features)


def _check_tree(tree: Mapping[str, Any], features: int) -> None:
    parameters = tree["tree_param"]
    nodes = int(parameters["num_nodes"])
    _require(0 < nodes < 2**20, "num_nodes")
    _require(int(parameters["num_deleted"]) == 0, "num_deleted")
    _require(int(parameters["num_feature"]) == features, "a tree's num_feature")
    _require(int(parameters["size_leaf_vector"]) in (0, 1), "size_leaf_vector")
    _require(not any(tree[name] for name in _CATEGORIES), "categories")
    for name in (*_PER_NODE_INTEGERS, *_PER_NODE_FLAGS, *_PER_NODE_NUMBERS):
        _require(isinstance(tree[name], list) and len(tree[name]) == nodes, f"the length of {name}")
    for name in _PER_NODE_INTEGERS:
        _require(all(type(value) is int for value in tree[name]), name)
    for name in _PER_NODE_NUMBERS:
        _require(all(_is_number(value) for value in tree[name]), name)
    _require(all(0 <= index < features for index in tree["split_indices"]), "split_indices")
    _require(all(flag in (0, 1) for flag in tree["default_left"]), "default_left")
    _require(all(flag == 0 for flag in tree["split_type"]), "split_type")
    _check_shape(tree["left_children"], tree["right_children"], tree["parents"])


def _check_shape(left: Sequence[int], right: Sequence[int], parents: Sequence[int]) -> None:
    """Every node is reached from the root, once; so there is no cycle and no index out of range."""
    _require(parents[0] in (-1, _NO_PARENT), "the root's parent")
    seen, pending = 1, [0]
    reached = [True] + [False] * (len(left) - 1)
    while pending:
        node = pending.pop()
        if left[node] == -1 and right[node] == -1:
            continue
        for child in (left[node], right[node]):
            _require(0 < child < len(left) and not reached[child], "children")
            _require(parents[child] == node, "parents")
            reached[child] = True
            seen += 1
            pending.append(child)
    _require(seen == len(left), "unreached nodes")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) < _LARGEST
    )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"broken booster: {what}")
