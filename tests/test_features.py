from __future__ import annotations

import numpy as np
import pytest

from tvm_energy.features import ROW_LENGTH, VECTOR_LENGTH, feature_names, pool, row_names

COLUMN = {name: index for index, name in enumerate(row_names())}
ENTRY = {name: index for index, name in enumerate(feature_names())}


def test_every_entry_has_a_name() -> None:
    assert len(row_names()) == len(set(row_names())) == ROW_LENGTH
    assert len(feature_names()) == len(set(feature_names())) == VECTOR_LENGTH
    assert pool([np.zeros((2, ROW_LENGTH))]).shape == (1, VECTOR_LENGTH)


def test_counts_add_up_as_counts() -> None:
    rows = np.zeros((2, ROW_LENGTH))
    rows[:, 0] = np.log2(1024)
    total = pool([rows])[0, 0]
    assert total == pytest.approx(np.log2(2048))


@pytest.mark.parametrize("other_work", ["int_mad", "int_other_func", "select_op"])
def test_the_store_with_most_arithmetic_is_the_heaviest(other_work: str) -> None:
    rows = np.zeros((3, ROW_LENGTH))
    rows[1, COLUMN["float_add_sub"]] = 30.0
    rows[2, COLUMN[other_work]] = 40.0  # other work does not beat floating-point work
    rows[:, COLUMN["num_loops"]] = [7.0, 8.0, 9.0]
    assert pool([rows])[0, ENTRY["heaviest_num_loops"]] == 8.0


def test_without_floating_point_the_most_work_of_any_kind_counts() -> None:
    rows = np.zeros((2, ROW_LENGTH))
    rows[:, COLUMN["int_mul"]] = [20.0, 10.0]
    rows[:, COLUMN["num_loops"]] = [7.0, 8.0]
    assert pool([rows])[0, ENTRY["heaviest_num_loops"]] == 7.0


def test_launch_geometry_is_multiplied() -> None:
    row = np.zeros((1, ROW_LENGTH))
    row[0, COLUMN["is_gpu"]] = 1
    extents = {
        "blockIdx_x": 8,
        "blockIdx_y": 4,
        "blockIdx_z": 2,
        "threadIdx_x": 32,
        "threadIdx_y": 3,
    }
    for name, extent in (extents | {"threadIdx_z": 5, "vthread": 7, "float_mul": 61440}).items():
        row[0, COLUMN[name]] = np.log2(1 + extent)
    vector = pool([row])[0]
    expected = {
        "blocks": 64,
        "threads_per_block": 480,
        "threads": 30720,
        "operations_per_thread": 2,
    }
    for name, value in expected.items():
        assert vector[ENTRY[f"launch_{name}"]] == pytest.approx(np.log2(1 + value)), name


def test_each_kernel_is_pooled_for_itself() -> None:
    rng = np.random.default_rng(0)
    kernels = [rng.uniform(0, 30, size=(stores, ROW_LENGTH)) for stores in (3, 0, 1, 7, 0)]
    alone = np.concatenate([pool([kernel]) for kernel in kernels])
    np.testing.assert_allclose(pool(kernels), alone)


def test_no_stores_and_no_kernels() -> None:
    assert not pool([np.zeros((0, ROW_LENGTH))]).any()
    assert pool([]).shape == (0, VECTOR_LENGTH)


def test_what_is_not_finite_counts_as_zero() -> None:
    rows = np.full((1, ROW_LENGTH), np.nan)
    rows[0, 5] = np.inf
    vector = pool([rows])
    assert np.isfinite(vector).all()
    np.testing.assert_array_equal(vector, pool([np.zeros((1, ROW_LENGTH))]))


def test_other_row_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(stores, 164\), got \(2, 3\)"):
        pool([np.zeros((2, 3))])


def test_columns_have_the_names_that_tvm_gives_them() -> None:
    """A kernel of known shape, through TVM's own extractor."""
    pytest.importorskip("tvm")
    from tvm_energy.meta_schedule.compat import import_tensor_intrinsics

    import_tensor_intrinsics()
    import tvm
    from tvm import te
    from tvm.s_tir import meta_schedule as ms

    a = te.placeholder((4096,), name="a")
    doubled = te.compute((4096,), lambda i: a[i] * 2.5, name="doubled")
    module = tvm.IRModule({"main": te.create_prim_func([a, doubled])})
    schedule = tvm.s_tir.Schedule(module)
    (loop,) = schedule.get_loops(schedule.get_sblock("doubled"))
    block, thread, lane = schedule.split(loop, [16, 64, 4])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    schedule.vectorize(lane)
    context = ms.TuneContext(mod=module, target=tvm.target.Target("nvidia/nvidia-a100"))
    candidate = ms.MeasureCandidate(schedule, ms.arg_info.ArgInfo.from_entry_func(module, True))
    extractor = ms.feature_extractor.PerStoreFeature(extract_workload=False)
    ((row,),) = (rows.numpy() for rows in extractor.extract_from(context, [candidate]))
    counts = {name: round(2 ** row[index] - 1) for name, index in COLUMN.items()}
    expected = {
        "float_mul": 4096,
        "float_add_sub": 0,
        "vectorize_len": 4,
        "unroll_none": 1,
        "is_gpu": 1,
        "blockIdx_x": 16,
        "threadIdx_x": 64,
        "threadIdx_y": 1,
        "buffer0_bytes": 4 * 4096,
        "buffer1_bytes": 4 * 4096,
        "buffer2_bytes": 0,
        "alloc_size": 4 * 4096,
        "num_loops": 3,
        "outer_prod": 4096,
        "auto_unroll_max_step": 0,
    }
    assert {name: counts[name] for name in expected} == expected
    assert counts["buffer0_read"] + counts["buffer1_read"] == 1
    assert counts["buffer0_write"] + counts["buffer1_write"] == 1
