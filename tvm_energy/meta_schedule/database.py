"""A database that ranks by the objective and stores in the stock format.

Records go to a stock database unchanged, seconds in ``run_secs``; stock TVM reads its files. What deployment
asks, ``query_tuning_record`` (and with it ``query_schedule``, ``query_ir_module``), is answered by energy instead of
latency: the chosen kernel, always a measured one. ``get_top_k``, which gives the search its parents, stays
what it is, the fastest: the order of the objective there made no difference that could be shown
(``docs/results.md``).
"""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.database import PyDatabase

from tvm_energy.meta_schedule.traces import trace_key, workload_hash
from tvm_energy.session import Session


@derived_object
class ObjectiveDatabase(PyDatabase):
    """Wraps a stock database; see the module's text.

    Args:
        inner: where records are kept, usually a ``JSONDatabase``.
        session: ranks the kernels.
    """

    def __init__(self, inner: Any, session: Session) -> None:
        super().__init__()
        self.core = _Core(inner, session)

    def has_workload(self, mod: Any) -> bool:
        """See ``Database.has_workload``."""
        return self.core.inner.has_workload(mod)

    def commit_workload(self, mod: Any) -> Any:
        """See ``Database.commit_workload``."""
        return self.core.inner.commit_workload(mod)

    def commit_tuning_record(self, record: Any) -> None:
        """See ``Database.commit_tuning_record``; a kernel that is there already is not added again."""
        self.core.commit(record)

    def get_top_k(self, workload: Any, top_k: int) -> list[Any]:
        """See ``Database.get_top_k``: the fastest kernels."""
        return self.core.inner.get_top_k(workload, int(top_k))

    def get_all_tuning_records(self) -> list[Any]:
        """See ``Database.get_all_tuning_records``."""
        return self.core.inner.get_all_tuning_records()

    def query_tuning_record(self, mod: Any, target: Any, workload_name: Any = None) -> Any:
        """The chosen kernel's record, or None."""
        return self.core.winner(mod)

    def __len__(self) -> int:
        return len(self.core.inner)


class _Core:
    def __init__(self, inner: Any, session: Session) -> None:
        self.inner = inner
        self.session = session
        self.records: dict[str, dict[str, Any]] = {}
        for record in inner.get_all_tuning_records():
            self._index(record)

    def _index(self, record: Any) -> bool:
        """Remember a record; False when its kernel is known already."""
        kernels = self.records.setdefault(workload_hash(record.workload.mod), {})
        key = trace_key(record.trace)
        if key in kernels:
            return False
        kernels[key] = record
        return True

    def commit(self, record: Any) -> None:
        if self._index(record):
            self.inner.commit_tuning_record(record)

    def winner(self, mod: Any) -> Any:
        name = workload_hash(mod)
        choice = self.session.choice(name)
        return None if choice is None else self.records.get(name, {}).get(choice.best.key)

    def record(self, workload: str, key: str) -> Any:
        """The stock record of a kernel, or None."""
        return self.records.get(workload, {}).get(key)
