"""One boosted regression over features, most of which are constant and left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_energy.energy_model.base import Floats
from tvm_energy.energy_model.booster_json import booster_from_json, booster_to_json
from tvm_energy.energy_model.compat import xgboost

#: No kernel has more features.
_MOST_FEATURES = 2**16


@dataclass(frozen=True, slots=True)
class Trees:
    """Boosted trees.

    More than half of a kernel's features never change on one device; leaving them out halves the
    fitting time.

    Attributes:
        booster: over the features in `columns`.
        columns: indices of the features that it uses, ascending.
        features: length of a complete feature vector.
    """

    booster: xgboost.Booster
    columns: npt.NDArray[np.int_]
    features: int

    @classmethod
    def train(
        cls,
        features: Floats,
        label: Floats,
        weight: Floats,
        parameters: Mapping[str, Any],
        rounds: int,
    ) -> Trees:
        """Fit to a label.

        Args:
            features: shape (n, n_features).
            label, weight: shape (n,).
            parameters: of xgboost.
            rounds: number of trees.
        """
        columns = np.flatnonzero(np.ptp(features, axis=0) > 0)
        if not len(columns):
            columns = np.array([0])
        data = xgboost.QuantileDMatrix(
            np.ascontiguousarray(features[:, columns]),
            label=label,
            weight=weight,
            max_bin=parameters["max_bin"],
            nthread=parameters["nthread"],
        )
        booster = xgboost.train(dict(parameters), data, num_boost_round=rounds)
        return cls(booster, columns, features.shape[1])

    def predict(self, features: Floats) -> Floats:
        """Predictions, shape (n,).

        Raises:
            ValueError: another number of features than learned from.
        """
        if features.shape[1] != self.features:
            raise ValueError(
                f"the model learned from {self.features} features, got {features.shape[1]}"
            )
        used = np.ascontiguousarray(features[:, self.columns])
        return np.asarray(self.booster.inplace_predict(used), dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "features": self.features,
            "columns": self.columns.tolist(),
            "booster": booster_to_json(self.booster),
        }

    @classmethod
    def from_json(cls, values: Any, threads: int) -> Trees:
        """The inverse of `to_json`, for files from anywhere.

        Raises:
            ValueError, KeyError, TypeError, xgboost.core.XGBoostError: this is no such model.
        """
        features, columns = values["features"], values["columns"]
        if type(features) is not int or not 0 < features < _MOST_FEATURES:
            raise ValueError(f"features: {features!r}")
        if not all(type(column) is int for column in columns):
            raise ValueError("columns must be integers")
        if columns != sorted(set(columns)) or not all(0 <= column < features for column in columns):
            raise ValueError("columns must be ascending indices of features")
        booster = booster_from_json(values["booster"])
        if booster.num_features() != len(columns):
            raise ValueError(f"{len(columns)} columns for {booster.num_features()} features")
        booster.set_param({"nthread": threads})  # a file does not keep it
        return cls(booster, np.array(columns), features)
