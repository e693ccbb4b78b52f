"""Samples to and from the JSON of a model file, safe to read from a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_energy.energy_model.base import Sample

#: No kernel has more features, and no file of ours more samples.
_MOST_FEATURES = 2**16
_MOST_SAMPLES = 2**14

#: Features are logarithms of counts.
_LARGEST_FEATURE = 1e6


def samples_to_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """JSON values; features rounded to five decimals."""
    return {
        "group": [sample.group for sample in samples],
        "latency_s": [sample.latency_s for sample in samples],
        "energy_j": [sample.energy_j for sample in samples],
        "features": [np.round(sample.features, 5).tolist() for sample in samples],
    }


def samples_from_json(values: Any) -> list[Sample]:
    """The inverse of `samples_to_json`.

    Raises:
        ValueError, KeyError, TypeError: these are no samples.
    """
    columns = [values[name] for name in ("group", "latency_s", "energy_j", "features")]
    if not all(isinstance(column, list) and len(column) <= _MOST_SAMPLES for column in columns):
        raise ValueError("samples must be lists")
    samples = [
        Sample(
            group=_text(group),
            features=_features(row),
            latency_s=_positive(latency_s),
            energy_j=None if energy_j is None else _positive(energy_j),
        )
        for group, latency_s, energy_j, row in zip(*columns, strict=True)
    ]
    if len({len(sample.features) for sample in samples}) > 1:
        raise ValueError("samples differ in their number of features")
    return samples


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a task must be a string")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 1e-15 <= value < 1e15:
        raise ValueError(f"{value!r} is no measured value")
    return float(value)


def _features(row: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not isinstance(row, list) or not 0 < len(row) < _MOST_FEATURES:
        raise ValueError("features must be a list of numbers")
    if not all(type(value) in (int, float) and abs(value) <= _LARGEST_FEATURE for value in row):
        raise ValueError("a feature is not a finite number")
    return np.array(row, dtype=np.float64)
