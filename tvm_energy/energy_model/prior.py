"""What physics says of a kernel before anything is measured: counts x published energy per operation.

The counts are those of the pooled features (`tvm_energy.features`); the energies are those of Horowitz,
*Computing's energy problem*, ISSCC 2014, figure 1.1.9: 45 nm, 0.9 V. They are far above those of today's
processes, and on a GPU operands cost more than arithmetic; but a task's scale is learned, so that only
their proportions matter. Which count stands for which level of memory is our choice: all bytes accessed
for the nearest memory, cache lines for the next, unique bytes for DRAM.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from tvm_energy.energy_model.base import Floats
from tvm_energy.errors import ConfigurationError
from tvm_energy.features import VECTOR_LENGTH, feature_names

#: Whether the energy model sees the prior.
Prior = Literal["none", "counts"]

#: Picojoules an operation; float32 and int32. Division: 7.1 multiplications, as Yarici et al., Frontiers
#: in Neurology 2022 (PMC8934428), measured on a Cortex-M4F; a comparison is a subtraction.
_ADD, _MULTIPLY, _INT_ADD, _INT_MULTIPLY = 0.9, 3.7, 0.1, 3.1
_OPERATION_PJ = {
    "float_mad": _ADD + _MULTIPLY,
    "float_add_sub": _ADD,
    "float_mul": _MULTIPLY,
    "float_div_mod": 7.1 * _MULTIPLY,
    "float_cmp": _ADD,
    "float_math_func": 7.1 * _MULTIPLY,
    "int_mad": _INT_ADD + _INT_MULTIPLY,
    "int_add_sub": _INT_ADD,
    "int_mul": _INT_MULTIPLY,
    "int_div_mod": 7.1 * _INT_MULTIPLY,
    "int_cmp": _INT_ADD,
}

#: Picojoules a byte: 64 bits from a cache of 8 KiB 10 pJ, of 1 MiB 100 pJ, from DRAM 1.3 to 2.6 nJ.
_NEAR_PJ, _CACHE_PJ, _DRAM_PJ = 10 / 8, 100 / 8, 1950 / 8
_LINE_BYTES = 64  # of the feature extractor

#: Names of the columns: log2(1 + pJ) in all, of arithmetic, and of three levels of memory.
PRIOR_NAMES = ("prior_total", "prior_arithmetic", "prior_near", "prior_cache", "prior_dram")


def check_prior(name: str) -> Prior:
    """The prior of this name.

    Raises:
        ConfigurationError: there is none; the message names those that there are.
    """
    for known in get_args(Prior):
        if name == known:
            return known
    raise ConfigurationError(f"unknown prior {name!r}; known are {', '.join(get_args(Prior))}")


def _terms() -> list[dict[str, float]]:
    """Picojoules by name of a count, for each part of the energy."""
    buffers = [f"buffer{number}" for number in range(5)]
    return [
        _OPERATION_PJ,
        {f"{buffer}_bytes": _NEAR_PJ for buffer in buffers},
        {f"{buffer}_lines": _CACHE_PJ * _LINE_BYTES for buffer in buffers},
        {f"{buffer}_unique_bytes": _DRAM_PJ for buffer in buffers},
    ]


def _matrix() -> Floats:
    """Picojoules a count, shape (features, parts)."""
    at = {name: index for index, name in enumerate(feature_names())}
    matrix = np.zeros((VECTOR_LENGTH, len(_terms())))
    for part, terms in enumerate(_terms()):
        for name, energy_pj in terms.items():
            matrix[at[f"total_{name}"], part] = energy_pj
    return matrix


_PICOJOULES = _matrix()
_USED = np.flatnonzero(_PICOJOULES.any(axis=1))


def prior_columns(features: Floats) -> Floats:
    """The prior of n kernels as columns beside their features.

    Args:
        features: pooled features, shape (n, 333).

    Returns:
        Shape (n, 5), in the order of `PRIOR_NAMES`.

    Raises:
        ValueError: the features are of another length: their counts are not known.
    """
    if features.shape[1] != VECTOR_LENGTH:
        raise ValueError(
            f"the prior needs the {VECTOR_LENGTH} pooled features, got {features.shape[1]}"
        )
    counts = np.exp2(np.clip(features[:, _USED], 0, 60)) - 1
    parts = counts @ _PICOJOULES[_USED]
    columns: Floats = np.log2(1 + np.column_stack([parts.sum(axis=1), parts]))
    return columns
