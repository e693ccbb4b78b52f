"""Features of a kernel: Ansor's per-store features, pooled into one vector of fixed length.

TVM's ``PerStoreFeature`` gives one row of 164 numbers for each store statement (Zheng et al., Ansor,
OSDI'20; Shao et al., MetaSchedule, NeurIPS'22): counts of operations by kind, vectorised, unrolled and
parallel loops, GPU launch geometry, up to five buffer accesses (bytes, unique bytes, cache lines,
reuse, stride), the arithmetic intensity curve, and allocations. Counts are already logarithms,
``log2(1 + x)``. These are the groups that the energy model of arXiv:2411.18873 names: operation
counts, vectorisation, loops, cache access.

A kernel has as many rows as stores. Pooled are

* the *total* of each column: ``log2`` of the sum of ``2**x``, so that counts add up as counts;
* the row of the *heaviest* store, the one with most arithmetic, in which the main loop sits;
* the number of stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Columns of one row of ``PerStoreFeature``.
ROW_LENGTH = 164

#: Length of a pooled vector.
VECTOR_LENGTH = 2 * ROW_LENGTH + 1

# The first eight columns count floating-point operations by kind, the next eight integer ones.
_FLOAT_OPERATIONS = slice(0, 8)
_ALL_OPERATIONS = slice(0, 16)

Floats = npt.NDArray[np.float64]


def feature_names() -> list[str]:
    """Names of the entries of a pooled vector, in order."""
    return [
        *(f"total[{column}]" for column in range(ROW_LENGTH)),
        *(f"heaviest[{column}]" for column in range(ROW_LENGTH)),
        "stores",
    ]


def pool(rows: Sequence[npt.NDArray[np.floating]]) -> Floats:
    """Pool the per-store features of kernels.

    Args:
        rows: one array for each kernel, shape (n_stores, 164); stores may be none.

    Returns:
        Shape (n_kernels, 329). A kernel without stores (its lowering failed) is all zeros; what is
        not finite counts as zero.

    Raises:
        ValueError: a row of another length than 164.
    """
    pooled = np.zeros((len(rows), VECTOR_LENGTH))
    for index, kernel in enumerate(rows):
        stores = np.nan_to_num(
            np.asarray(kernel, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0
        )
        if stores.size == 0:
            continue
        if stores.ndim != 2 or stores.shape[1] != ROW_LENGTH:
            raise ValueError(
                f"per-store features must have shape (stores, {ROW_LENGTH}), got {stores.shape}"
            )
        pooled[index, :ROW_LENGTH] = np.log2(np.exp2(np.minimum(stores, 60)).sum(axis=0))
        pooled[index, ROW_LENGTH:-1] = stores[_heaviest(stores)]
        pooled[index, -1] = len(stores)
    return pooled


def _heaviest(stores: Floats) -> int:
    """Index of the store with most floating-point work; integer work decides where there is none."""
    weight = np.exp2(np.minimum(stores, 60))
    floats = weight[:, _FLOAT_OPERATIONS].sum(axis=1)
    return int(np.lexsort((weight[:, _ALL_OPERATIONS].sum(axis=1), floats))[-1])
