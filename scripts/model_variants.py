"""The energy model in the variants that the ablations compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvm_energy.energy_model.xgb import XgbKernelModel


class Unweighted(XgbKernelModel):
    """Every sample counts the same in the loss; which ones are learned from is still drawn by weight."""

    def _train(
        self,
        samples: Any,
        label: Any,
        weight: Any,
        parameters: dict[str, Any],
        rounds: int,
    ) -> Any:
        return super()._train(samples, label, np.ones_like(weight), parameters, rounds)


def reread(model: XgbKernelModel) -> XgbKernelModel:
    """A model as a later run finds it in its file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.json")
        loaded = XgbKernelModel()
        loaded.load(Path(folder) / "model.json")
    return loaded


MODELS: Mapping[str, Callable[[int], XgbKernelModel]] = {
    "factored": lambda seed: XgbKernelModel("factored", seed=seed),
    "direct": lambda seed: XgbKernelModel("direct", seed=seed),
    "factored, unweighted": lambda seed: Unweighted("factored", seed=seed),
    "direct, unweighted": lambda seed: Unweighted("direct", seed=seed),
    "factored, prior": lambda seed: XgbKernelModel("factored", seed=seed, prior="counts"),
    "direct, prior": lambda seed: XgbKernelModel("direct", seed=seed, prior="counts"),
}
