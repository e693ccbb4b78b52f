"""What makes a search faster without changing what it finds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tvm_energy.meta_schedule import compat

# isort: split
import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

from tvm_energy.meta_schedule.cost_model import FeatureReader
from tvm_energy.meta_schedule.mutation import WaitingMutator, parent_count, waiting_space
from tvm_energy.meta_schedule.search import default_population
from tvm_energy.meta_schedule.tuning import evolutionary_search

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture(scope="module")
def module() -> Any:
    a = te.placeholder((32, 32), name="a")
    b = te.placeholder((32, 32), name="b")
    k = te.reduce_axis((0, 32), name="k")
    c = te.compute((32, 32), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")})


def test_only_x86_intrinsics_are_loaded_and_the_others_later() -> None:
    script = """
import sys
from tvm_energy.meta_schedule import compat
import tvm
from tvm.s_tir import TensorIntrin, meta_schedule
def known(name):
    return TensorIntrin.get(name, allow_missing=True) is not None
target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
with compat.tensor_intrinsics(target):
    module = tvm.IRModule()
    meta_schedule.TuneContext(target=target)  # imports the package itself
    assert known("dot_16x4_vnni") and not known("mma_load_m16n8k8_f16_A_shared_dyn")
    assert not known("wmma_fill_16x16x16_f32")
    with compat.tensor_intrinsics(target):
        pass
assert "tvm.s_tir.tensor_intrin" not in sys.modules or known("wmma_fill_16x16x16_f32")
compat.import_tensor_intrinsics()
assert known("dot_16x4_vnni") and known("wmma_fill_16x16x16_f32")
with compat.tensor_intrinsics(target):
    assert known("wmma_fill_16x16x16_f32")
assert "tvm.s_tir.tensor_intrin" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.parametrize(
    ("target", "x86"),
    [
        ({"kind": "llvm", "mtriple": "x86_64-pc-linux-gnu"}, True),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, False),
        ({"kind": "cuda", "arch": "sm_80"}, False),
    ],
)
def test_which_targets_need_only_x86_intrinsics(target: dict[str, str], x86: bool) -> None:
    assert compat._is_x86(tvm.target.Target(target)) is x86


def test_a_search_of_stocks_rounds_is_stocks() -> None:
    assert [default_population(size) for size in (4, 16, 64, 1000)] == [64, 128, 512, 512]
    stock = ms.search_strategy.EvolutionarySearch()
    ours = evolutionary_search(default_population(64))
    for name in ("population_size", "init_measured_ratio", "init_min_unmeasured", "max_fail_count"):
        assert getattr(ours, name) == getattr(stock, name)


def test_how_many_kernels_become_parents() -> None:
    assert parent_count(ms.search_strategy.EvolutionarySearch()) == 102  # a fifth of 512
    assert parent_count(evolutionary_search(64)) == 12
    assert parent_count(ms.search_strategy.ReplayTrace()) is None


def test_mutators_wait_until_it_is_time(module: Any) -> None:
    compat.import_tensor_intrinsics()
    ready = False
    space = waiting_space(module, TARGET, lambda: ready)
    stock = ms.TuneContext(mod=module, target=TARGET, space_generator="post-order-apply")
    probabilities = sorted(float(p) for p in stock.space_generator.mutator_probs.values())
    assert sorted(float(p) for p in space.mutator_probs.values()) == probabilities
    context = ms.TuneContext(mod=module, target=TARGET, space_generator=space).clone()
    trace = context.generate_design_space()[-1].trace
    mutators = list(context.space_generator.mutator_probs)
    assert all(mutator.apply(trace) is None for mutator in mutators)
    ready = True
    mutated = [new for mutator in mutators for _ in range(20) if (new := mutator.apply(trace))]
    assert any(str(new) != str(trace) for new in mutated)


def test_a_mutator_passes_on_the_seed(module: Any) -> None:
    compat.import_tensor_intrinsics()
    space = waiting_space(module, TARGET, lambda: True)
    context = ms.TuneContext(mod=module, target=TARGET, space_generator=space).clone()
    trace = context.generate_design_space()[-1].trace
    for mutator in ms.mutator.Mutator.create("llvm"):
        mutator._initialize_with_tune_context(context)
        ours = WaitingMutator(mutator, lambda: True)
        same = [ms._ffi_api.MutatorApply(ours, trace, 5) for _ in range(4)]
        assert len({str(new) for new in same}) == 1


def test_features_that_are_remembered_are_those_that_were_read(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compat.import_tensor_intrinsics()
    context = ms.TuneContext(mod=module, target=TARGET, space_generator="post-order-apply").clone()
    arguments = ms.arg_info.ArgInfo.from_entry_func(module, True)

    def sample(seed: int) -> Any:
        schedule = tvm.s_tir.Schedule(module, seed=seed)
        trace = context.generate_design_space()[seed % 2].trace
        trace.apply_to_schedule(schedule, remove_postproc=True)
        return ms.MeasureCandidate(schedule, arguments)

    candidates = [sample(seed) for seed in (1, 2, 3, 4)]
    fresh = [FeatureReader()(context, [candidate])[0] for candidate in candidates]
    assert len({row.tobytes() for row in fresh}) > 1
    monkeypatch.setattr("tvm_energy.meta_schedule.cost_model._REMEMBERED", 3)
    reader = FeatureReader()
    extracted = 0
    extract = reader._extractor.extract_from

    def counting(context: Any, new: Any) -> Any:
        nonlocal extracted
        extracted += len(new)
        return extract(context, new)

    reader._extractor = type("Extractor", (), {"extract_from": staticmethod(counting)})()
    orders = ([0, 1], [1, 1, 2], [0, 1, 2, 3], [3, 0])
    for order in orders:
        rows = reader(context, [candidates[index] for index in order])
        np.testing.assert_array_equal(rows, [fresh[index] for index in order])
        assert len(reader._known) <= 3
    # 0 and 1; 2; 3, for which 0 goes; 0 again.
    assert extracted == 2 + 1 + 1 + 1
