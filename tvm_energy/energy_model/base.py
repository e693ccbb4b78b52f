"""What an energy model is: a sample in, a prediction out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One kernel that ran.

    Attributes:
        group: its task; samples are normalised within their group, because joules of different tasks
            differ by orders of magnitude.
        features: pooled features, shape (n_features,).
        latency_s: measured seconds a launch.
        energy_j: measured joules a launch, None when only latency is known.
    """

    group: str
    features: Floats
    latency_s: float
    energy_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predictions for n kernels.

    Attributes:
        latency_s: shape (n,); the measured latency where it was given.
        energy_j: joules a launch, shape (n,); None while too few energies are known.
        energy_stderr_j: standard error of `energy_j`, shape (n,), from errors that the model made on
            kernels it had not seen; None with `energy_j`.
    """

    latency_s: Floats
    energy_j: Floats | None = None
    energy_stderr_j: Floats | None = None


class KernelModel(Protocol):
    """Predicts latency and energy from features."""

    def fit(self, samples: Sequence[Sample]) -> None:
        """Learn from all samples anew."""
        ...

    def predict(
        self, features: Floats, group: str, latency_s: Floats | None = None
    ) -> Prediction | None:
        """Predict kernels of one task.

        Args:
            features: shape (n, n_features).
            group: their task.
            latency_s: measured latencies, shape (n,), once they are known.

        Returns:
            None while nothing is known of the group.
        """
        ...

    def save(self, path: str | Path) -> None:
        """Write the model as JSON."""
        ...

    def load(self, path: str | Path) -> None:
        """Read a model written by `save`.

        Raises:
            RecordFormatError: the file is not such a model.
        """
        ...
