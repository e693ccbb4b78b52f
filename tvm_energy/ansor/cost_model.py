"""The cost model that Ansor's search asks: latency and energy predicted, scored by the objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_energy.ansor.compat import load_auto_scheduler

# isort: split
import numpy as np
from tvm.auto_scheduler.cost_model.cost_model import PythonBasedModel
from tvm.auto_scheduler.feature import get_per_store_features_from_states

from tvm_energy.ansor.names import workload_of
from tvm_energy.features import pool
from tvm_energy.session import Session

load_auto_scheduler()


def read_features(task: Any, states: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ansor's per-store features of programs, pooled into one vector each.

    Returns:
        Features, shape (n, n_features), and which of the programs could be lowered, shape (n,).
    """
    rows = [np.asarray(item) for item in get_per_store_features_from_states(states, task)]
    lowered = np.array([bool(item.size and item.any()) for item in rows], dtype=bool)
    empty = np.zeros((0, 164))
    return pool([row if ok else empty for row, ok in zip(rows, lowered, strict=True)]), lowered


class EnergyCostModel(PythonBasedModel):
    """Scores programs for the evolutionary search.

    Learning happens in the measure callback, which alone knows what energy was measured; so `update`
    has nothing to do.

    Args:
        session: predicts and scores.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._workloads: dict[str, str] = {}

    def update(self, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Nothing: see the class's text."""

    def predict(self, task: Any, states: Any) -> list[float]:
        """Scores, one for each state; higher is better, minus infinity for a program that is invalid."""
        if len(states) == 0:
            return []
        features, lowered = read_features(task, states)
        scores = self.session.scores(self._workload(task), features)
        return [float(value) for value in np.where(lowered, scores, -np.inf)]

    def predict_stages(self, task: Any, states: Any) -> np.ndarray:
        """Scores of programs and of their parts, in the packed form of Ansor's interface.

        As in stock Ansor a part is a store statement; here its score is that of a program which has no
        other. Ansor's search never asks for it.
        """
        packed = self.predict(task, states)
        for rows in get_per_store_features_from_states(states, task):
            stores = np.asarray(rows)
            parts = pool([stores[index : index + 1] for index in range(len(stores))])
            packed += [float(len(stores)), *self.session.scores(self._workload(task), parts)]
        return np.array(packed, dtype="float32")

    def load(self, file_name: str) -> None:
        """Load the energy model from a JSON file."""
        self.session.model.load(file_name)

    def save(self, file_name: str) -> None:
        """Save the energy model as a JSON file."""
        self.session.model.save(file_name)

    def _workload(self, task: Any) -> str:
        name = f"{task.workload_key} {task.target}"
        if name not in self._workloads:
            self._workloads[name] = workload_of(task)
        return self._workloads[name]
