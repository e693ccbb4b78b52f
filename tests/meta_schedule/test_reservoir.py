"""Tile sizes that a GPU can run, and the search that remembers its candidates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

# After compat, which checks the versions.
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule
from tvm.s_tir.schedule.trace import Trace

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule import compat
from tvm_energy.meta_schedule import search as search_module
from tvm_energy.meta_schedule.search import ReservoirSearch
from tvm_energy.meta_schedule.tilings import Tiling, Tilings, _draw, _factors
from tvm_energy.meta_schedule.traces import trace_key
from tvm_energy.meta_schedule.tuning import normalized
from tvm_energy.meta_schedule.workloads import parse_workload
from tvm_energy.simulation.devices import find_device

GPU = tvm.target.Target(find_device("a100").target)
CPU = tvm.target.Target({"kind": "llvm", "num-cores": 2})
WORKLOADS = (
    "matmul:m=128,n=768,k=768",
    "matvec:m=4096,k=4096",
    "conv2d:n=1,ci=64,co=64,h=14,w=14,kernel=3,padding=1",
)


def context_of(workload: str, target: Any, seed: int = 1, threads: int = 1) -> Any:
    compat.import_tensor_intrinsics()
    return ms.TuneContext(
        mod=normalized(parse_workload(workload).primfunc()),
        target=target,
        space_generator="post-order-apply",
        task_name="main",
        rand_state=seed,
        num_threads=threads,
    )


def applied(context: Any, trace: Any, seed: int) -> tuple[Any, bool]:
    """The trace with its decisions, and whether TVM's postprocessors accept it."""
    schedule = Schedule(context.mod, seed=seed, debug_mask="none")
    trace.apply_to_schedule(schedule, remove_postproc=True)
    decided = schedule.trace
    schedule.enter_postproc()
    return decided, all(each.apply(schedule) for each in context.space_generator.postprocs)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_cannot_run_is_known_beforehand(workload: str) -> None:
    context = context_of(workload, GPU)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for space in context.generate_design_space():
        tilings = Tilings(context.mod, space.trace, GPU)
        for seed in range(1, 31):
            decided, valid = applied(context, Trace(space.trace.insts, {}), seed)
            verdicts[tilings.fits(decided), valid] += 1
    assert not verdicts[False, True]
    assert verdicts[True, False] <= 1
    assert verdicts[False, False] > 60


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_is_drawn_can_run(workload: str) -> None:
    context, rng = context_of(workload, GPU), np.random.default_rng(0)
    valid = []
    for space in context.generate_design_space():
        instructions = space.trace.insts
        drawn = Tilings(context.mod, space.trace, GPU).draw(rng, 10)
        assert len(drawn) == 10
        for sizes in drawn:
            trace = Trace(instructions, {instructions[at]: each for at, each in sizes.items()})
            valid.append(applied(context, trace, 1)[1])
    assert np.mean(valid) >= 0.95


def test_threads_and_shared_memory_of_a_product_by_hand() -> None:
    context = context_of("matmul:m=128,n=768,k=768", GPU)
    for space, copies in zip(context.generate_design_space(), (1, 3, 4), strict=True):
        tilings = Tilings(context.mod, space.trace, GPU)

        def fit(*sizes: list[int], tilings: Tilings = tilings) -> bool:
            return bool(tilings.fit([np.array([each]) for each in sizes])[0])

        # Blocks of 16 x 32 threads; k in steps of 16: (16 x 16 + 16 x 32) x 4 bytes a copy.
        assert fit([8, 1, 16, 1, 1], [24, 1, 32, 1, 1], [48, 4, 4])
        assert not fit([64, 1, 2, 1, 1], [96, 1, 8, 1, 1], [48, 4, 4])  # 16 threads
        assert not fit([2, 1, 64, 1, 1], [24, 1, 32, 1, 1], [48, 4, 4])  # 2048
        assert not fit([8, 1, 16, 1, 1], [4, 1, 2, 1, 96], [48, 4, 4])  # innermost over 64
        # Tiles of 64 x 64 and k in steps of s: 64 x s x 2 x 4 bytes a copy, 48 KB in all.
        steps = [s for s in (16, 24, 32, 48, 64, 96) if 64 * s * 8 * copies <= 49152]
        for step in (16, 24, 32, 48, 64, 96):
            found = fit([2, 1, 16, 4, 1], [12, 1, 16, 4, 1], [768 // step, step, 1])
            assert found is (step in steps)


def test_a_window_counts_its_border_once() -> None:
    context = context_of("conv2d:n=1,ci=64,co=64,h=14,w=14,kernel=3,padding=1", GPU)
    tilings = Tilings(context.mod, context.generate_design_space()[0].trace, GPU)
    data, weight = tilings._buffers
    one = [[1] * 5, [2, 1, 32, 1, 1], [7, 1, 2, 1, 1], [14, 1, 1, 1, 1]]
    sizes = [np.array([each]) for each in (*one, [32, 1, 2], [1, 3, 1], [3, 1, 1])]
    from tvm_energy.meta_schedule.tilings import _bytes

    # 2 channels, 2 rows and 3 - 1 more, 1 column; 32 outputs x 2 channels x 3 x 1 weights.
    assert int(_bytes(data, sizes, 1)[0]) == 2 * (2 + 2) * 1 * 4
    assert int(_bytes(weight, sizes, 1)[0]) == 32 * 2 * 3 * 1 * 4


def test_a_cpu_has_no_such_limits() -> None:
    context = context_of(WORKLOADS[0], CPU)
    for space in context.generate_design_space():
        tilings = Tilings(context.mod, space.trace, CPU)
        assert len(tilings.draw(np.random.default_rng(0), 5)) == 5
        assert tilings.fits(space.trace)


def test_sizes_are_drawn_evenly() -> None:
    drawn = _draw(Tiling(0, 12, 3, 64), np.random.default_rng(0), 18_000)
    assert (drawn.prod(axis=1) == 12).all()
    counts = Counter(map(tuple, drawn.tolist()))
    assert len(counts) == 18  # ordered factorizations of 12 into three
    assert all(800 < count < 1200 for count in counts.values())
    assert _factors(768) == {2: 8, 3: 1}
    assert _factors(1) == {}
    assert _factors(97) == {97: 1}


class Judge:
    """Stands for a session: leads when told to, and likes candidates by one of their features."""

    def __init__(self, leading: bool = True) -> None:
        self.leading = leading
        self.column: int | None = None
        self.asked: dict[bytes, float] = {}

    def leads(self, workload: str) -> bool:
        return self.leading

    def scores(self, workload: str, features: np.ndarray) -> np.ndarray:
        if self.column is None:
            self.column = int(np.argmax(features.std(axis=0)))
        scores = features[:, self.column]
        self.asked.update({row.tobytes(): s for row, s in zip(features, scores, strict=True)})
        return scores


def search_of(
    judge: Judge, context: Any, database: Any, trials: int, population: int = 32
) -> ReservoirSearch:
    search = ReservoirSearch(judge, population)  # type: ignore[arg-type]
    search._initialize_with_tune_context(context)
    search.pre_tuning(trials, 8, context.generate_design_space(), database)
    return search


def keys_of(batch: Any) -> list[str]:
    return [trace_key(candidate.sch.trace) for candidate in batch]


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("target", [GPU, CPU], ids=["gpu", "cpu"])
def test_batches_are_new_and_end_with_the_trials(target: Any, leading: bool) -> None:
    batches = []
    for threads in (1, 2):
        context = context_of(WORKLOADS[0], target, threads=threads)
        search = search_of(Judge(leading), context, ms.database.MemoryDatabase(), trials=20)
        batches.append([keys_of(search.generate_measure_candidates()) for _ in range(3)])
        assert search.generate_measure_candidates() is None
        search.post_tuning()
    assert [len(batch) for batch in batches[0]] == [8, 8, 4]
    assert len({key for batch in batches[0] for key in batch}) == 20
    assert batches[0] == batches[1]  # the same on any number of threads


def test_the_best_of_all_that_were_seen_are_chosen() -> None:
    judge, context = Judge(), context_of(WORKLOADS[0], GPU)
    search = search_of(judge, context, ms.database.MemoryDatabase(), trials=64)
    search.generate_measure_candidates()
    first = set(judge.asked)
    search.population = 2  # next to nothing new
    batch = search.generate_measure_candidates()
    reservoir = search._reservoir
    assert reservoir is not None
    assert batch is not None
    features = reservoir._features(context, batch)
    remembered = [row.tobytes() in first for row in features]
    assert sum(remembered) >= 5
    left = [float(each.features[judge.column]) for each in reservoir._held.values()]
    chosen = sorted(float(row[judge.column]) for row in features)
    assert chosen[1] >= max(left)  # all but one that may be there by chance
    search.post_tuning()


def test_no_more_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_HELD", 4)
    monkeypatch.setattr(search_module, "_EPS_GREEDY", 1.0)  # also of those that are to be forgotten
    context = context_of(WORKLOADS[0], GPU)
    search = search_of(Judge(), context, ms.database.MemoryDatabase(), trials=24)
    for _ in range(3):
        assert len(search.generate_measure_candidates() or ()) == 8
        assert search._reservoir is not None
        assert len(search._reservoir._held) <= 4
    search.post_tuning()


def test_a_resumed_search_draws_others() -> None:
    context, database = context_of(WORKLOADS[0], GPU), ms.database.MemoryDatabase()
    search = search_of(Judge(leading=False), context, database, trials=8)
    batch = search.generate_measure_candidates()
    search.post_tuning()
    row = database.commit_workload(context.mod)
    for candidate in batch or ():
        database.commit_tuning_record(
            ms.database.TuningRecord(
                candidate.sch.trace, row, [1e-3], GPU, list(candidate.args_info)
            )
        )
    again = search_of(Judge(leading=False), context, database, trials=8)
    assert not set(keys_of(again.generate_measure_candidates())) & set(keys_of(batch))
    again.post_tuning()


def test_a_kernel_without_choices_is_tried_once() -> None:
    context = context_of("matmul:m=1,n=1,k=1", CPU)
    search = search_of(Judge(leading=False), context, ms.database.MemoryDatabase(), trials=64)
    batches = []
    while (batch := search.generate_measure_candidates()) is not None:
        batches += keys_of(batch)
    assert 1 <= len(batches) == len(set(batches))
    search.post_tuning()


def test_wrong_sizes_and_broken_traces() -> None:
    with pytest.raises(ConfigurationError, match="population must be at least 1, got 0"):
        ReservoirSearch(Judge(), 0)  # type: ignore[arg-type]
    context = context_of(WORKLOADS[0], GPU)
    search = search_of(Judge(), context, ms.database.MemoryDatabase(), trials=8)
    assert search._reservoir is not None
    other = context_of(WORKLOADS[1], GPU).generate_design_space()[0].trace
    assert search._reservoir._new([other]) == {}
    search.post_tuning()
