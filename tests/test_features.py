from __future__ import annotations

import numpy as np
import pytest

from tvm_energy.features import ROW_LENGTH, VECTOR_LENGTH, feature_names, pool


def test_every_entry_has_a_name() -> None:
    assert len(feature_names()) == len(set(feature_names())) == VECTOR_LENGTH
    assert pool([np.zeros((2, ROW_LENGTH))]).shape == (1, VECTOR_LENGTH)


def test_counts_add_up_as_counts() -> None:
    rows = np.zeros((2, ROW_LENGTH))
    rows[:, 0] = np.log2(1024)
    total = pool([rows])[0, 0]
    assert total == pytest.approx(np.log2(2048))


def test_the_store_with_most_arithmetic_is_the_heaviest() -> None:
    rows = np.zeros((3, ROW_LENGTH))
    rows[1, 1] = 30.0
    rows[2, 9] = 40.0  # integer work does not beat floating-point work
    rows[:, 100] = [7.0, 8.0, 9.0]
    assert pool([rows])[0, ROW_LENGTH + 100] == 8.0


def test_no_stores_and_no_kernels() -> None:
    assert not pool([np.zeros((0, ROW_LENGTH))]).any()
    assert pool([]).shape == (0, VECTOR_LENGTH)


def test_what_is_not_finite_counts_as_zero() -> None:
    rows = np.full((1, ROW_LENGTH), np.nan)
    rows[0, 5] = np.inf
    assert np.isfinite(pool([rows])).all()


def test_other_row_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(stores, 164\), got \(2, 3\)"):
        pool([np.zeros((2, 3))])
