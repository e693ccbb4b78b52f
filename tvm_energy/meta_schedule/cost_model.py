"""The cost model that MetaSchedule's search asks: latency and energy predicted, scored by the objective."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel
from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature
from tvm_ffi import structural_hash

from tvm_energy.features import pool
from tvm_energy.meta_schedule.traces import workload_hash
from tvm_energy.session import Session

#: Candidates whose features are remembered: those of the last few generations.
_REMEMBERED = 4096


class FeatureReader:
    """Ansor's per-store features of candidates, pooled into one vector each.

    A generation keeps some candidates of the one before it, and each search starts from measured
    ones: a fifth of all. Their features are remembered.
    """

    def __init__(self) -> None:
        self._extractor = PerStoreFeature(extract_workload=False)
        self._known: dict[int, np.ndarray] = {}

    def __call__(self, context: Any, candidates: Any) -> np.ndarray:
        """Features, shape (n_candidates, n_features)."""
        names = [structural_hash(candidate.sch.mod) for candidate in candidates]
        new = {
            name: candidate
            for name, candidate in zip(names, candidates, strict=True)
            if name not in self._known
        }
        if new:
            rows = self._extractor.extract_from(context, list(new.values()))
            pooled = pool([row.numpy() for row in rows])
            self._known.update(zip(new, pooled, strict=True))
        features = np.stack([self._known[name] for name in names])
        for name in list(self._known)[:-_REMEMBERED]:
            del self._known[name]
        return features


@derived_object
class EnergyCostModel(PyCostModel):
    """Scores candidates for the evolutionary search.

    Learning happens in the measure callback, which alone knows what energy was measured; so `update`
    has nothing to do. `load` and `save` keep the model as JSON.

    Args:
        session: predicts and scores.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.features = FeatureReader()

    def load(self, path: str) -> None:
        """Load the energy model from a JSON file."""
        self.session.model.load(path)

    def save(self, path: str) -> None:
        """Save the energy model as a JSON file."""
        self.session.model.save(path)

    def update(self, context: Any, candidates: Any, results: Any) -> None:
        """Nothing: see the class's text."""

    def predict(self, context: Any, candidates: Any) -> np.ndarray:
        """Scores, shape (n,), float64; higher is better."""
        workload = workload_hash(context.mod)
        # Reading features takes longer than the rest of the search: not for scores that ignore them.
        if len(candidates) == 0 or not self.session.leads(workload):
            return self.session.random_scores(len(candidates))
        features = self.features(context, candidates)
        return self.session.scores(workload, features).astype("float64")
