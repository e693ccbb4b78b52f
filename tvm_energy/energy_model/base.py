"""What an energy model is: a sample in, a prediction out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
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
        energy_scores: those errors, ``log(measured / predicted)`` over their root mean square,
            ascending, shape (k,); empty while none was seen.
    """

    latency_s: Floats
    energy_j: Floats | None = None
    energy_stderr_j: Floats | None = None
    energy_scores: Floats = field(default_factory=lambda: np.zeros(0))

    def interval(self, level: float) -> tuple[Floats, Floats]:
        """Joules between which the measured energy will lie with a probability of `level`.

        Split conformal prediction (Vovk, Gammerman and Shafer, *Algorithmic Learning in a Random World*,
        2005; Lei et al., J. American Statistical Association 113, 2018): the interval ends at order
        statistics of the errors made on kernels not yet seen, (1 - level) / 2 of them beyond either end.
        It holds where new errors are like the remembered ones, whatever their distribution. With too few
        errors for the level, those of a normal distribution stand in.

        Args:
            level: between 0 and 1, exclusive.

        Returns:
            Lower and upper ends, shape (n,) each.

        Raises:
            ValueError: no energy was predicted, or `level` is out of range.
        """
        if self.energy_j is None or self.energy_stderr_j is None:
            raise ValueError("no energy was predicted")
        if not 0 < level < 1:
            raise ValueError(f"the level must lie between 0 and 1, got {level}")
        tail = (1 - level) / 2
        beyond = math.floor((len(self.energy_scores) + 1) * tail + 1e-9)
        if beyond:
            low, high = self.energy_scores[beyond - 1], self.energy_scores[-beyond]
        else:
            high = NormalDist().inv_cdf(1 - tail)
            low = -high
        spread = self.energy_stderr_j / self.energy_j
        return self.energy_j * np.exp(low * spread), self.energy_j * np.exp(high * spread)


class KernelModel(Protocol):
    """Predicts latency and energy from features."""

    def earlier(self, group: str) -> int:
        """How many kernels of a task it has learned from in earlier runs."""
        ...

    def fit(self, samples: Sequence[Sample]) -> None:
        """Learn from all samples of this run anew, and from those of earlier runs."""
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
