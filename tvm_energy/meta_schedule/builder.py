"""Builders that keep their worker processes, and know again what an earlier run has tried."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm_ffi import structural_hash

from tvm_energy.kernels.history import History
from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.meta_schedule.build import build_library


def module_hash(mod: Any) -> str:
    """Structural hash of a scheduled module, the name under which a run knows it again."""
    return f"{structural_hash(mod) & 0xFFFFFFFFFFFFFFFF:016x}"


@derived_object
class PooledBuilder(PyBuilder):
    """Compiles candidates in a `WorkerPool`.

    Args:
        pool: the worker processes.
        history: modules whose latency is known already; they are not built again.
        build: worker function ``(mod, target, folder) -> artifact path``.
    """

    def __init__(self, pool: WorkerPool, history: History, build: Any = build_library) -> None:
        super().__init__()
        self.core = _BuilderCore(pool, history, build)

    def build(self, build_inputs: list[Any]) -> list[BuilderResult]:
        """See ``PyBuilder.build``."""
        return self.core.build(build_inputs)


class _BuilderCore:
    def __init__(self, pool: WorkerPool, history: History, build: Any) -> None:
        self._pool = pool
        self._history = history
        self._build = build
        self._folder = tempfile.mkdtemp(prefix="tvm_energy_")

    def build(self, build_inputs: list[Any]) -> list[BuilderResult]:
        results: dict[int, BuilderResult] = {}
        jobs = []
        for index, item in enumerate(build_inputs):
            name = module_hash(item.mod)
            known = self._history.placeholder(name, self._folder)
            if known is not None:
                results[index] = BuilderResult(known, None)
            else:
                jobs.append((index, name, item))
        outcomes = self._pool.map(
            self._build, [(item.mod, item.target, self._folder) for _, _, item in jobs]
        )
        for (index, name, _), (path, error) in zip(jobs, outcomes, strict=True):
            if path is not None:
                self._history.built(path, name)
            results[index] = BuilderResult(path, None if error is None else f"build: {error}")
        return [results[index] for index in range(len(build_inputs))]

    def build_again(self, mod: Any, target: Any) -> tuple[str | None, str | None]:
        """Build one module whether it is on record or not: (path, None) or (None, reason)."""
        ((path, error),) = self._pool.map(self._build, [(mod, target, self._folder)])
        return path, error

    def close(self) -> None:
        """Remove what was built and not yet removed."""
        shutil.rmtree(self._folder, ignore_errors=True)
