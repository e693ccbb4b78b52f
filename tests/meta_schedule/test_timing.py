"""Timing kernels: long where they may be the best, short where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from tvm import te

from tvm_energy.kernels.workers import run_library
from tvm_energy.meta_schedule.build import build_library

ARGUMENTS = [((1 << 16,), "float32"), ((1 << 16,), "float32")]


def kernel() -> tvm.IRModule:
    """One that calls the C library."""
    source = te.placeholder(ARGUMENTS[0][0], name="source")
    target = te.compute(source.shape, lambda i: te.erf(te.power(source[i], 1.5)), name="target")
    return tvm.IRModule({"main": te.create_prim_func([source, target])})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_library(kernel(), tvm.target.Target("llvm"), str(tmp_path_factory.mktemp("built")))


def timed(library: str, best_s: float) -> list[float]:
    return run_library(
        library,
        "cpu",
        ARGUMENTS,
        number=1,
        repeat=3,
        min_repeat_ms=20,
        best_s=best_s,
        seed=0,
    )


def test_a_candidate_is_linked_without_start_up_files_and_still_finds_the_c_library(
    library: str, tmp_path: Path
) -> None:
    assert Path(library).suffix == ".so"
    assert min(timed(library, float("inf"))) > 0


def test_a_kernel_is_timed_in_full_only_if_it_may_be_the_best(library: str) -> None:
    (usual, _, _) = timed(library, float("inf"))
    assert len(timed(library, usual)) == 3
    assert len(timed(library, usual / 3)) == 1  # a short timing shows it
    assert len(timed(library, usual / 100)) == 1  # a single run does
