"""The model of this package: gradient-boosted trees for latency and for energy.

Two variants:

``direct``
    Energy from features. Label ``log(E / E_min)`` within the task, squared loss weighted with
    ``w = E_min / E``, so that low-energy kernels, between which the search has to decide, count most.
    XGBoost and a weighted loss are what arXiv:2411.18873 uses; the formula of the weight is our
    reconstruction, after Ansor, whose weight is the normalised throughput. Weights are scaled to a
    mean of 1 in each task.
``factored``
    Power from features, label ``log(P / P_typical)`` within the task, same weights; energy is predicted
    power times latency. Latency is known by the time that energy is predicted, so all of its
    variance leaves the model's error. Ours, and the default (see ``docs/results.md``).

Latency, for kernels that have not been built, has a model of its own: label and weight ``t_min / t``, as
in Ansor. (With ``log(t / t_min)`` as label, slow kernels took up the trees: the rank correlation of
predicted energy in the search fell from 0.54 to 0.47; ``scripts/bench_energy_model.py``, simulated.)

Standard errors and intervals of a prediction come from the errors made on each new batch *before* the
model learned from it; after the first batch, which no model foresaw, from cross-validation. They are kept
for each task, and apart for latency known and unknown. `Prediction.interval` turns them into conformal
intervals: no second model is fitted, as quantile regression or an ensemble would need, and the coverage
does not hang on how well such a model is fitted. xgboost's public interface only.

All tasks share the trees, since labels are relative to the task's own scale. So a task profits from what
was learned of others, in this run or, by `adopt`, in an earlier one of the same device: a model file keeps
the samples that say most. A task of which no kernel is known is not predicted: how kernels of other tasks
are ordered says nothing of it (rank correlation 0.03, simulated; ``docs/results.md``).
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tvm_energy.energy_model.base import Floats, Prediction, Sample
from tvm_energy.energy_model.compat import xgboost
from tvm_energy.energy_model.prior import Prior, check_prior, prior_columns
from tvm_energy.energy_model.samples_json import samples_from_json, samples_to_json
from tvm_energy.energy_model.trees import Trees
from tvm_energy.errors import RecordFormatError

Variant = Literal["factored", "direct"]

_FORMAT = "tvm_energy.energy_model"
_VERSION = 4

#: Fewest samples to fit anything to.
_MIN_SAMPLES = 8

#: Errors of new batches that are remembered for each task; a few rounds' worth.
_REMEMBERED_ERRORS = 64

#: A task with fewer errors of its own is judged by those of all tasks.
_OWN_ERRORS = 20

#: No error, a logarithm, is larger: predictions are clipped to e**20 of the task's scale.
_LARGEST_ERROR = 100.0

#: Samples that each model learns from at most, so that fitting takes no longer however long a search
#: runs. Drawn by weight, so that it is slow kernels which go: rank correlations of
#: `bench_energy_model` fell by less than 0.01.
_MOST_SAMPLES = 1536

#: Samples that a file keeps for later runs: half of what is learned from at most, which leaves room for the
#: run's own.
_MOST_KEPT = _MOST_SAMPLES // 2

#: The largest file that is read: one of ours takes about 2.5 MB.
_LARGEST_FILE_BYTES = 64 << 20

#: Energies are few, since only kernels near the fastest are measured: leaves are shrunk more.
_ENERGY_LAMBDA = 5.0

#: No kernel is predicted to be slower than the fastest by more than this factor's inverse.
_LEAST_SPEED = 0.01

#: Parts of the first batch that are predicted from the others.
_FOLDS = 4

#: Relative standard error assumed before any error was seen.
_PRIOR_RELATIVE_ERROR = 0.3

#: No prediction is believed to be better than this: measurements themselves err by about as much.
_LEAST_RELATIVE_ERROR = 0.01


class XgbKernelModel:
    """See the module's text.

    Args:
        variant: ``factored`` or ``direct``.
        seed: of the trees' random choices.
        rounds: trees in the energy model; the latency model has twice as many.
        threads: of xgboost; more than one pays only for many thousands of samples.
        prior: ``counts`` learns from `tvm_energy.energy_model.prior` beside the features.
        origin: where and how its samples were measured, as JSON; written to the file.
    """

    def __init__(
        self,
        variant: Variant = "factored",
        *,
        seed: int = 0,
        rounds: int = 60,
        threads: int = 1,
        prior: Prior = "none",
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        check_prior(prior)
        if variant not in ("factored", "direct"):
            raise ValueError(f"variant must be 'factored' or 'direct', got {variant!r}")
        self.variant: Variant = variant
        self.prior: Prior = prior
        self.origin: dict[str, Any] = dict(origin or {})
        self._rounds = rounds
        self._seed = seed % 2**31
        self._threads = threads
        self._parameters: dict[str, Any] = {
            "objective": "reg:squarederror",
            "tree_method": "hist",
            "max_depth": 5,
            # Few bins: features are logarithms of counts, and fitting time is what a round pays.
            "max_bin": 32,
            "eta": 0.2,
            "min_child_weight": 0.5,
            "subsample": 0.9,
            "colsample_bytree": 0.3,
            "seed": self._seed,
            "nthread": threads,
            "verbosity": 0,
        }
        self._latency: Trees | None = None
        self._energy: Trees | None = None
        # Per group: least latency, least energy, typical (median) power.
        self._least_s: dict[str, float] = {}
        self._least_j: dict[str, float] = {}
        self._typical_w: dict[str, float] = {}
        # log(measured / predicted) of kernels not seen, with latency known and unknown.
        self._errors = _Errors()
        self._search_errors = _Errors()
        self._seen: set[tuple[str, float, float]] = set()
        # Of earlier runs; and what was learned from last, these included.
        self._earlier: list[Sample] = []
        self._known: list[Sample] = []

    def earlier(self, group: str | None = None) -> int:
        """See `KernelModel.earlier`; of all tasks where none is named."""
        return sum(group in (None, sample.group) for sample in self._earlier)

    @property
    def earlier_features(self) -> int | None:
        """Length of the feature vectors of earlier runs; None without any."""
        return len(self._earlier[0].features) if self._earlier else None

    @property
    def knows_anything(self) -> bool:
        """Whether it has learned from any kernel."""
        return bool(self._known)

    @property
    def relative_error(self) -> float:
        """Root mean square relative error on kernels not seen, over all tasks, their latency known."""
        return _root_mean_square(self._errors.all())

    @property
    def relative_search_error(self) -> float:
        """The same, their latency unknown."""
        return _root_mean_square(self._search_errors.all())

    # -- learning ------------------------------------------------------------------------------

    def fit(self, samples: Sequence[Sample]) -> None:
        """See `KernelModel.fit`."""
        self._note_errors(samples)
        self._learn(samples)
        if not self._errors:
            self._cross_validate(samples)

    def adopt(self, other: XgbKernelModel, *, energies: bool = True) -> None:
        """Begin with the kernels from which another model, of an earlier run, has learned.

        Its errors are not taken over: at the end of a run they are small, and other tasks' intervals would
        be too narrow (coverage at 90 %: 76 %, simulated).

        Args:
            other: read from a file; its variant and prior need not be the same.
            energies: False when its joules were measured in another way than ours will be.
        """
        self._earlier = [
            sample if energies else replace(sample, energy_j=None) for sample in other._earlier
        ]
        self._learn([])

    def _learn(self, samples: Sequence[Sample]) -> None:
        samples = self._known = [*self._earlier, *samples]
        self._normalise(samples)
        if len(samples) < _MIN_SAMPLES:
            return
        least_s = np.array([self._least_s[sample.group] for sample in samples])
        latency_s = np.array([sample.latency_s for sample in samples])
        speed = least_s / latency_s
        self._latency = self._train(samples, speed, speed, self._parameters, 2 * self._rounds)
        measured = [sample for sample in samples if sample.energy_j is not None]
        if len(measured) < _MIN_SAMPLES:
            return
        energy_j = _energies(measured)
        least_j = np.array([self._least_j[sample.group] for sample in measured])
        if self.variant == "direct":
            label = np.log(energy_j / least_j)
        else:
            power_w = energy_j / np.array([sample.latency_s for sample in measured])
            label = np.log(power_w / [self._typical_w[sample.group] for sample in measured])
        parameters = self._parameters | {"lambda": _ENERGY_LAMBDA}
        self._energy = self._train(measured, label, least_j / energy_j, parameters, self._rounds)

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
            known, unknown = self._errors_on(group, batch)
            self._errors.add(group, known)
            self._search_errors.add(group, unknown)

    def _errors_on(self, group: str, batch: Sequence[Sample]) -> tuple[list[float], list[float]]:
        """``log(measured / predicted)`` of energies, with latency known and unknown."""
        features = np.stack([sample.features for sample in batch])
        latency_s = np.array([sample.latency_s for sample in batch])
        known, unknown = (
            []
            if prediction is None or prediction.energy_j is None
            else list(np.log(_energies(batch) / prediction.energy_j))
            for prediction in (
                self.predict(features, group, latency_s=latency_s),
                self.predict(features, group),
            )
        )
        return known, unknown

    def _cross_validate(self, samples: Sequence[Sample]) -> None:
        """Errors on each part of the samples, of models that learned from the other parts."""
        for fold in range(_FOLDS):
            model = XgbKernelModel(
                self.variant,
                seed=self._seed,
                rounds=self._rounds,
                threads=self._threads,
                prior=self.prior,
            )
            model._earlier = self._earlier
            model._learn([s for at, s in enumerate(samples) if at % _FOLDS != fold])
            held_out: dict[str, list[Sample]] = {}
            for sample in samples[fold::_FOLDS]:
                if sample.energy_j is not None:
                    held_out.setdefault(sample.group, []).append(sample)
            for group, batch in held_out.items():
                known, unknown = model._errors_on(group, batch)
                self._errors.add(group, known)
                self._search_errors.add(group, unknown)

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

    def _train(
        self,
        samples: Sequence[Sample],
        label: Floats,
        weight: Floats,
        parameters: dict[str, Any],
        rounds: int,
    ) -> Trees:
        weight = _mean_one([sample.group for sample in samples], weight)
        kept = _heaviest(weight, self._seed)
        features = self._inputs(np.stack([samples[index].features for index in kept]))
        return Trees.train(features, label[kept], weight[kept], parameters, rounds)

    # -- predicting ----------------------------------------------------------------------------

    def predict(
        self, features: Floats, group: str, latency_s: Floats | None = None
    ) -> Prediction | None:
        """See `KernelModel.predict`."""
        if group not in self._least_s or (latency_s is None and self._latency is None):
            return None
        inputs = self._inputs(features)
        errors = (self._errors if latency_s is not None else self._search_errors).of(group)
        if latency_s is None:
            assert self._latency is not None
            speed = np.maximum(self._latency.predict(inputs), _LEAST_SPEED)
            latency_s = self._least_s[group] / speed
        if self._energy is None or group not in self._least_j:
            return Prediction(latency_s=latency_s)
        # The clip only guards exp: trees give nothing beyond their leaves.
        ratio = np.exp(np.clip(self._energy.predict(inputs), -20, 20))
        if self.variant == "direct":
            energy_j = self._least_j[group] * ratio
        else:
            energy_j = self._typical_w[group] * ratio * latency_s
        return Prediction(
            latency_s=latency_s,
            energy_j=energy_j,
            energy_stderr_j=(size := _root_mean_square(errors)) * energy_j,
            energy_scores=np.sort(errors) / size,
        )

    def _inputs(self, features: Floats) -> Floats:
        """What the trees see."""
        if self.prior == "none":
            return features
        return np.hstack([features, prior_columns(features)])

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """See `KernelModel.save`."""
        values = {
            "format": _FORMAT,
            "version": _VERSION,
            "variant": self.variant,
            "prior": self.prior,
            "origin": self.origin,
            "samples": samples_to_json(_most_telling(self._known, self._seed)),
            "least_s": self._least_s,
            "least_j": self._least_j,
            "typical_w": self._typical_w,
            "errors": self._errors.to_json(),
            "search_errors": self._search_errors.to_json(),
            "seen": sorted(self._seen),
            "latency": self._latency and self._latency.to_json(),
            "energy": self._energy and self._energy.to_json(),
        }
        unfinished = Path(f"{path}.part")
        unfinished.write_text(json.dumps(values, allow_nan=False), encoding="utf-8")
        os.replace(unfinished, path)

    def load(self, path: str | Path) -> None:
        """See `KernelModel.load`. Whatever the file holds, nothing of it is executed."""
        try:
            if Path(path).stat().st_size > _LARGEST_FILE_BYTES:
                raise ValueError("it is too large")
            values = json.loads(
                Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant
            )
            self._take_over(values)
        except (
            AttributeError,
            KeyError,
            OverflowError,
            TypeError,
            ValueError,
            RecursionError,
            xgboost.core.XGBoostError,
        ) as exc:
            raise RecordFormatError(
                f"{path} is not an energy model of this version "
                f"({type(exc).__name__}: {_first_line(exc)}); "
                "tuning again in its work directory writes it anew"
            ) from exc

    def _take_over(self, values: Any) -> None:
        """Replace everything learned, or, when anything is wrong, nothing."""
        if values["format"] != _FORMAT or values["version"] != _VERSION:
            raise ValueError(f"format {values['format']!r}, version {values['version']!r}")
        if values["variant"] not in ("factored", "direct"):
            raise ValueError(f"variant {values['variant']!r}")
        check_prior(values["prior"])
        origin = dict(values["origin"])
        earlier = samples_from_json(values["samples"])
        tables = [_table(values[name]) for name in ("least_s", "least_j", "typical_w")]
        if tables[1].keys() != tables[2].keys() or not tables[1].keys() <= tables[0].keys():
            raise ValueError("the scales are of different tasks")
        errors, search_errors = (
            _Errors.from_json(values[name]) for name in ("errors", "search_errors")
        )
        seen = {(str(group), _finite(t), _finite(e)) for group, t, e in values["seen"]}
        latency, energy = (
            None if values[name] is None else Trees.from_json(values[name], self._threads)
            for name in ("latency", "energy")
        )
        self.variant, self.prior, self.origin = values["variant"], values["prior"], origin
        self._earlier = self._known = earlier
        self._least_s, self._least_j, self._typical_w = tables
        self._errors, self._search_errors, self._seen = errors, search_errors, seen
        self._latency, self._energy = latency, energy


def _most_telling(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """At most `_MOST_KEPT` samples: those with energy first, drawn by weight as in learning."""
    kept: list[Sample] = []
    for wanted in (True, False):
        pool = [sample for sample in samples if (sample.energy_j is not None) == wanted]
        if not pool:
            continue
        least: dict[str, float] = {}
        for sample in pool:
            least[sample.group] = min(_cost(sample), least.get(sample.group, np.inf))
        weight = np.array([least[sample.group] / _cost(sample) for sample in pool])
        weight = _mean_one([sample.group for sample in pool], weight)
        kept += [pool[index] for index in _heaviest(weight, seed, _MOST_KEPT - len(kept))]
    return kept


def _cost(sample: Sample) -> float:
    return sample.latency_s if sample.energy_j is None else sample.energy_j


def _mean_one(groups: Sequence[str], weight: Floats) -> Floats:
    """Scale weights to a mean of 1 in each group: a task with a wide spread counts like any other."""
    _, number = np.unique(groups, return_inverse=True)
    mean = np.bincount(number, weights=weight) / np.bincount(number)
    return weight / mean[number]


def _heaviest(weight: Floats, seed: int, most: int = _MOST_SAMPLES) -> npt.NDArray[np.int_]:
    """At most `most` indices, drawn without replacement with probability by weight.

    Efraimidis and Spirakis, Information Processing Letters 97, 2006: the largest ``u ** (1 / weight)``.
    """
    if len(weight) <= most:
        return np.arange(len(weight))
    uniform = np.random.default_rng(seed).random(len(weight))
    keys = np.log(uniform) / np.maximum(weight, 1e-12)
    return np.sort(np.argpartition(-keys, most)[:most])


def _energies(samples: Sequence[Sample]) -> Floats:
    return np.array([sample.energy_j for sample in samples], dtype=np.float64)


class _Errors:
    """The latest errors of each task."""

    def __init__(self) -> None:
        self._of: dict[str, deque[float]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, group: str, errors: Sequence[float]) -> None:
        if errors:
            self._of.setdefault(group, deque(maxlen=_REMEMBERED_ERRORS)).extend(errors)

    def of(self, group: str) -> Floats:
        """Of one task, or of all while it has few: they differ more between tasks than within one."""
        own = self._of.get(group, ())
        if len(own) >= _OWN_ERRORS:
            return np.array(own)
        return self.all()

    def all(self) -> Floats:
        return np.array([error for errors in self._of.values() for error in errors])

    def to_json(self) -> dict[str, list[float]]:
        return {group: list(errors) for group, errors in self._of.items()}

    @classmethod
    def from_json(cls, values: Any) -> _Errors:
        errors = cls()
        for group, numbers in values.items():
            errors.add(str(group), [_finite(number) for number in numbers])
            if any(abs(number) > _LARGEST_ERROR for number in errors._of.get(group, ())):
                raise ValueError("an error is too large")
        return errors


def _root_mean_square(errors: Floats) -> float:
    if not len(errors):
        return _PRIOR_RELATIVE_ERROR
    return max(_LEAST_RELATIVE_ERROR, float(np.sqrt(np.mean(np.square(errors)))))


def _table(value: Any) -> dict[str, float]:
    table = {str(key): _finite(number) for key, number in value.items()}
    if not all(number > 0 for number in table.values()):
        raise ValueError("a scale must be positive")
    return table


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0][:200]
