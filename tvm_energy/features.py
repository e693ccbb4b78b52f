"""Features of a kernel: Ansor's per-store features, pooled into one vector of fixed length.

TVM's ``PerStoreFeature`` gives one row of 164 numbers for each buffer that is stored to (Zheng et al.,
Ansor, OSDI'20; Shao et al., MetaSchedule, NeurIPS'22): counts of operations by kind, vectorised,
unrolled and parallel loops, GPU launch geometry, up to five buffer accesses (bytes, unique bytes, cache
lines, reuse, stride), the arithmetic intensity curve, and allocations. Counts are already logarithms,
``log2(1 + x)``. These are the groups that the energy model of arXiv:2411.18873 names: operation
counts, vectorisation, loops, cache access. `row_names` lists the columns, after
``src/meta_schedule/feature_extractor/per_store_feature.cc`` of TVM.

A kernel has as many rows as stores. Pooled are

* the *total* of each column: ``log2`` of the sum of ``2**x``, so that counts add up as counts;
* the row of the *heaviest* store, the one with most arithmetic, in which the main loop sits;
* its launch geometry as products, which trees cannot form: blocks, threads a block, threads in all,
  floating-point operations a thread; each ``log2(1 + x)``;
* the number of stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Columns of one row of ``PerStoreFeature``.
ROW_LENGTH = 164

_OPERATIONS = ("mad", "add_sub", "mul", "div_mod", "cmp", "math_func", "other_func")
_LOOP_KINDS = ("vectorize", "unroll", "parallel")
_LOOP = (
    *("num", "prod", "len", "none", "inner_spatial", "middle_spatial", "outer_spatial"),
    *("inner_reduce", "middle_reduce", "outer_reduce", "mixed"),
)
_GEOMETRY = (
    *("blockIdx_x", "blockIdx_y", "blockIdx_z", "threadIdx_x", "threadIdx_y", "threadIdx_z"),
    "vthread",
)
_BUFFER = (
    *("read", "write", "read_write", "bytes", "unique_bytes", "lines", "unique_lines"),
    *("loop_reuse", "serial_reuse", "no_reuse", "reuse_distance_iter", "reuse_distance_bytes"),
    *("reuse_count", "bytes_per_reuse", "unique_bytes_per_reuse", "lines_per_reuse"),
    *("unique_lines_per_reuse", "stride"),
)
_ALLOCATION = ("alloc_size", "alloc_prod", "alloc_outer_prod", "alloc_inner_prod")
_NEST = ("outer_prod", "num_loops", "auto_unroll_max_step")
_LAUNCH = ("blocks", "threads_per_block", "threads", "operations_per_thread")

_FLOAT_OPERATIONS = slice(0, 7)
_ALL_OPERATIONS = slice(0, 16)
_BLOCKS = slice(50, 53)
_THREADS = slice(53, 56)

#: Length of a pooled vector.
VECTOR_LENGTH = 2 * ROW_LENGTH + len(_LAUNCH) + 1

# Counts beyond 2**60 do not occur; the limit keeps sums finite whatever a row holds.
_LARGEST_LOG2 = 60.0

Floats = npt.NDArray[np.float64]


def row_names() -> list[str]:
    """Names of the 164 columns of a row, in order."""
    return [
        *(f"{kind}_{name}" for kind in ("float", "int") for name in _OPERATIONS),
        *("bool_op", "select_op"),
        *(f"{kind}_{name}" for kind in _LOOP_KINDS for name in _LOOP),
        *("is_gpu", *_GEOMETRY),
        *(f"buffer{number}_{name}" for number in range(5) for name in _BUFFER),
        *(f"intensity{number}" for number in range(10)),
        *(*_ALLOCATION, *_NEST),
    ]


def feature_names() -> list[str]:
    """Names of the entries of a pooled vector, in order."""
    rows = row_names()
    return [
        *(f"total_{name}" for name in rows),
        *(f"heaviest_{name}" for name in rows),
        *(f"launch_{name}" for name in _LAUNCH),
        "stores",
    ]


def pool(rows: Sequence[npt.NDArray[np.floating]]) -> Floats:
    """Pool the per-store features of kernels.

    Args:
        rows: one array for each kernel, shape (n_stores, 164); stores may be none.

    Returns:
        Shape (n_kernels, 333). A kernel without stores (its lowering failed) is all zeros; what is
        not finite counts as zero.

    Raises:
        ValueError: a row of another length than 164.
    """
    pooled = np.zeros((len(rows), VECTOR_LENGTH))
    kernels = [np.asarray(kernel, dtype=np.float64) for kernel in rows]
    for kernel in kernels:
        if kernel.size and (kernel.ndim != 2 or kernel.shape[1] != ROW_LENGTH):
            raise ValueError(
                f"per-store features must have shape (stores, {ROW_LENGTH}), got {kernel.shape}"
            )
    present = np.flatnonzero([kernel.size > 0 for kernel in kernels])
    if not len(present):
        return pooled
    counts = np.array([len(kernels[index]) for index in present])
    stores = np.concatenate([kernels[index] for index in present])
    stores = np.nan_to_num(stores, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    starts = np.cumsum(counts) - counts
    weight = np.exp2(np.clip(stores, -_LARGEST_LOG2, _LARGEST_LOG2))
    heaviest = stores[_heaviest(weight, counts)]
    pooled[present, :ROW_LENGTH] = np.log2(np.add.reduceat(weight, starts))
    pooled[present, ROW_LENGTH : 2 * ROW_LENGTH] = heaviest
    pooled[present, 2 * ROW_LENGTH : -1] = _launch(heaviest)
    pooled[present, -1] = counts
    return pooled


def _heaviest(weight: Floats, counts: npt.NDArray[np.int_]) -> npt.NDArray[np.int_]:
    """Of each kernel, the store with most floating-point work; among equals, most work of any kind."""
    kernel = np.repeat(np.arange(len(counts)), counts)
    floats = weight[:, _FLOAT_OPERATIONS].sum(axis=1)
    order: npt.NDArray[np.int_] = np.lexsort(
        (weight[:, _ALL_OPERATIONS].sum(axis=1), floats, kernel)
    )
    last: npt.NDArray[np.int_] = order[np.cumsum(counts) - 1]
    return last


def _launch(row: Floats) -> Floats:
    """Launch geometry of stores, shape (n, 4)."""

    def count(columns: slice) -> Floats:
        counts: Floats = np.exp2(np.clip(row[:, columns], 0, _LARGEST_LOG2)) - 1
        return counts

    # Outside a GPU the extents are 1 each.
    blocks = np.maximum(count(_BLOCKS), 1).prod(axis=1)
    threads = np.maximum(count(_THREADS), 1).prod(axis=1)
    operations = count(_FLOAT_OPERATIONS).sum(axis=1)
    columns = (blocks, threads, blocks * threads, operations / (blocks * threads))
    logarithms: Floats = np.log2(1 + np.stack(columns, axis=1))
    return logarithms
