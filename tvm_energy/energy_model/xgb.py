"""The model of this package: gradient-boosted trees for latency and for energy.

Two variants:

``direct``
    Energy from features. Label ``log(E / E_min)`` within the task, squared loss weighted with
    ``w = E_min / E``, so that low-energy kernels, between which the search has to decide, count most.
    XGBoost and a weighted loss are what arXiv:2411.18873 uses; the formula of the weight is our
    reconstruction, after Ansor, whose weight is the normalised throughput.
``factored``
    Power from features, label ``log(P / P_typical)`` within the task, same weights; energy is predicted
    power times latency. Latency is known by the time that energy is predicted, so all of its
    variance leaves the model's error. Ours, and the default (see ``docs/results.md``).

Latency, for kernels that have not been built, has a model of its own: label ``log(t / t_min)``, weight
``t_min / t``.

The standard error of a prediction comes from the errors made on each new batch *before* the model
learned from it. xgboost's public interface only.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xgboost

from tvm_energy.energy_model.base import Floats, Prediction, Sample
from tvm_energy.errors import RecordFormatError

Variant = Literal["factored", "direct"]

_FORMAT = "tvm_energy.energy_model"
_VERSION = 1

#: Fewest samples to fit anything to.
_MIN_SAMPLES = 8

#: Errors of new batches that are remembered; a few rounds' worth.
_REMEMBERED_ERRORS = 96

#: Relative standard error assumed before any error was seen.
_PRIOR_RELATIVE_ERROR = 0.3

#: No prediction is believed to be better than this: measurements themselves err by about as much.
_LEAST_RELATIVE_ERROR = 0.01


class XgbKernelModel:
    """See the module's text.

    Args:
        variant: ``factored`` or ``direct``.
        seed: of the trees' random choices.
        rounds: trees in each model.
        threads: of xgboost; more than one pays only for many thousands of samples.
    """

    def __init__(
        self,
        variant: Variant = "factored",
        *,
        seed: int = 0,
        rounds: int = 80,
        threads: int = 1,
    ) -> None:
        if variant not in ("factored", "direct"):
            raise ValueError(f"variant must be 'factored' or 'direct', got {variant!r}")
        self.variant: Variant = variant
        self._rounds = rounds
        self._parameters = {
            "objective": "reg:squarederror",
            "tree_method": "hist",
            "max_depth": 5,
            # Few bins: features are logarithms of counts, and fitting time is what a round pays.
            "max_bin": 32,
            "eta": 0.15,
            "min_child_weight": 0.5,
            "subsample": 0.9,
            "colsample_bytree": 0.3,
            "seed": seed % 2**31,
            "nthread": threads,
            "verbosity": 0,
        }
        self._latency: xgboost.Booster | None = None
        self._energy: xgboost.Booster | None = None
        # Per group: least latency, least energy, typical (median) power.
        self._least_s: dict[str, float] = {}
        self._least_j: dict[str, float] = {}
        self._typical_w: dict[str, float] = {}
        self._errors: deque[float] = deque(maxlen=_REMEMBERED_ERRORS)
        self._seen: set[tuple[str, float, float]] = set()

    @property
    def relative_error(self) -> float:
        """Root mean square relative error on kernels that the model had not seen."""
        if not self._errors:
            return _PRIOR_RELATIVE_ERROR
        return max(_LEAST_RELATIVE_ERROR, float(np.sqrt(np.mean(np.square(self._errors)))))

    # -- learning ------------------------------------------------------------------------------

    def fit(self, samples: Sequence[Sample]) -> None:
        """See `KernelModel.fit`."""
        self._note_errors(samples)
        self._normalise(samples)
        if len(samples) < _MIN_SAMPLES:
            return
        least_s = np.array([self._least_s[sample.group] for sample in samples])
        latency_s = np.array([sample.latency_s for sample in samples])
        self._latency = self._train(samples, np.log(latency_s / least_s), least_s / latency_s)
        measured = [sample for sample in samples if sample.energy_j is not None]
        if len(measured) < _MIN_SAMPLES:
            return
        energy_j = np.array([sample.energy_j for sample in measured], dtype=np.float64)
        least_j = np.array([self._least_j[sample.group] for sample in measured])
        if self.variant == "direct":
            label = np.log(energy_j / least_j)
        else:
            power_w = energy_j / np.array([sample.latency_s for sample in measured])
            label = np.log(power_w / [self._typical_w[sample.group] for sample in measured])
        self._energy = self._train(measured, label, least_j / energy_j)

    def _note_errors(self, samples: Sequence[Sample]) -> None:
        """Compare what the model would have said of new measurements, before it learns from them."""
        new: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.energy_j is None:
                continue
            name = (sample.group, sample.latency_s, sample.energy_j)
            if name not in self._seen:
                self._seen.add(name)
                new.setdefault(sample.group, []).append(sample)
        for group, batch in new.items():
            prediction = self.predict(
                np.stack([sample.features for sample in batch]),
                group,
                latency_s=np.array([sample.latency_s for sample in batch]),
            )
            if prediction is None or prediction.energy_j is None:
                continue
            truth_j = np.array([sample.energy_j for sample in batch], dtype=np.float64)
            self._errors.extend(prediction.energy_j / truth_j - 1)

    def _normalise(self, samples: Sequence[Sample]) -> None:
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group, []).append(sample)
        for group, members in by_group.items():
            self._least_s[group] = min(sample.latency_s for sample in members)
            energies = [(s.energy_j, s.latency_s) for s in members if s.energy_j is not None]
            if energies:
                self._least_j[group] = min(energy_j for energy_j, _ in energies)
                self._typical_w[group] = float(np.median([e / t for e, t in energies]))

    def _train(self, samples: Sequence[Sample], label: Floats, weight: Floats) -> xgboost.Booster:
        features = np.stack([sample.features for sample in samples])
        data = xgboost.DMatrix(features, label=label, weight=weight)
        return xgboost.train(self._parameters, data, num_boost_round=self._rounds)

    # -- predicting ----------------------------------------------------------------------------

    def predict(
        self, features: Floats, group: str, latency_s: Floats | None = None
    ) -> Prediction | None:
        """See `KernelModel.predict`."""
        if group not in self._least_s or (latency_s is None and self._latency is None):
            return None
        data = xgboost.DMatrix(np.asarray(features, dtype=np.float64))
        if latency_s is None:
            assert self._latency is not None
            latency_s = self._least_s[group] * np.exp(_predict(self._latency, data))
        if self._energy is None or group not in self._least_j:
            return Prediction(latency_s=latency_s)
        ratio = np.exp(_predict(self._energy, data))
        if self.variant == "direct":
            energy_j = self._least_j[group] * ratio
        else:
            energy_j = self._typical_w[group] * ratio * latency_s
        return Prediction(
            latency_s=latency_s,
            energy_j=energy_j,
            energy_stderr_j=self.relative_error * energy_j,
        )

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """See `KernelModel.save`."""
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "variant": self.variant,
            "least_s": self._least_s,
            "least_j": self._least_j,
            "typical_w": self._typical_w,
            "errors": list(self._errors),
            "latency": _to_json(self._latency),
            "energy": _to_json(self._energy),
        }
        Path(path).write_text(json.dumps(values), encoding="utf-8")

    def load(self, path: str | Path) -> None:
        """See `KernelModel.load`."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["format"] != _FORMAT or values["version"] != _VERSION:
                raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
            if values["variant"] not in ("factored", "direct"):
                raise ValueError(f"variant {values['variant']!r}")
            tables = [_table(values[name]) for name in ("least_s", "least_j", "typical_w")]
            errors = [float(value) for value in values["errors"]]
            latency, energy = _from_json(values["latency"]), _from_json(values["energy"])
        except FileNotFoundError:
            raise
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
            xgboost.core.XGBoostError,
        ) as exc:
            raise RecordFormatError(
                f"{path} is not an energy model of this version: {type(exc).__name__}: {exc}"
            ) from exc
        self.variant = values["variant"]
        self._least_s, self._least_j, self._typical_w = tables
        self._errors = deque(errors, maxlen=_REMEMBERED_ERRORS)
        self._latency, self._energy = latency, energy


def _predict(booster: xgboost.Booster, data: xgboost.DMatrix) -> Floats:
    # Far outside of what was seen, trees give nothing beyond their leaves; the clip only guards exp.
    return np.clip(booster.predict(data).astype(np.float64), -20, 20)


def _to_json(booster: xgboost.Booster | None) -> Any:
    return None if booster is None else json.loads(booster.save_raw("json").decode())


def _from_json(value: Any) -> xgboost.Booster | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("a booster must be a JSON object")
    booster = xgboost.Booster()
    booster.load_model(bytearray(json.dumps(value).encode()))
    return booster


def _table(value: Any) -> dict[str, float]:
    positive: Callable[[float], bool] = lambda number: 0 < number < float("inf")  # noqa: E731
    table = {str(key): float(number) for key, number in value.items()}
    if not all(positive(number) for number in table.values()):
        raise ValueError("a scale must be positive and finite")
    return table
