"""Latency and power over core and memory clock together.

    t = a / f_core + b / f_mem + c                      (s; clocks in MHz)
    P = c + k_core f_core^3 + k_mem f_mem               (W)

All coefficients >= 0. That time is a function of both clocks is the subject of Han, Nan, Zhou and Niu, "Joint
Memory Frequency and Computing Frequency Scaling for Energy-efficient DNN Inference", arXiv:2509.17970; their
formula was not to be read anywhere, so this one is our reconstruction. Independent measurements
(arXiv:2606.16106) found that no such formula of the memory clock holds for every workload: where each memory
clock can be measured, fit the core clock for each of them by itself (`tvm_energy.dvfs.fitting`), which makes
no assumption, and take this form only for memory clocks with too few points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tvm_energy.dvfs.forms import Array
from tvm_energy.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class JointFit:
    """Coefficients of (core term, memory term, constant), and the relative residual of the points."""

    quantity: str
    core: float
    memory: float
    constant: float
    rms: float

    def predict(self, core_mhz: ArrayLike, memory_mhz: ArrayLike) -> Array:
        """Values at pairs of clocks; the two arguments broadcast."""
        core, memory = np.asarray(core_mhz, dtype=float), np.asarray(memory_mhz, dtype=float)
        columns = _columns(self.quantity, core, memory)
        return np.asarray(self.core * columns[0] + self.memory * columns[1] + self.constant)


def fit_joint_latency(core_mhz: ArrayLike, memory_mhz: ArrayLike, latency_s: ArrayLike) -> JointFit:
    """Fit t over both clocks, by relative least squares with coefficients >= 0.

    Args:
        core_mhz, memory_mhz, latency_s: shape (n,); at least four points, two core and two memory clocks.

    Raises:
        ConfigurationError: the points do not support the form.
    """
    return _fit("latency", core_mhz, memory_mhz, latency_s)


def fit_joint_power(core_mhz: ArrayLike, memory_mhz: ArrayLike, power_w: ArrayLike) -> JointFit:
    """Fit P over both clocks; as `fit_joint_latency`."""
    return _fit("power", core_mhz, memory_mhz, power_w)


def _columns(quantity: str, core: Array, memory: Array) -> tuple[Array, Array]:
    return (1 / core, 1 / memory) if quantity == "latency" else (core**3, memory)


def _fit(quantity: str, core_mhz: ArrayLike, memory_mhz: ArrayLike, values: ArrayLike) -> JointFit:
    from scipy.optimize import nnls

    core, memory, y = (np.asarray(item, dtype=float) for item in (core_mhz, memory_mhz, values))
    if not core.shape == memory.shape == y.shape or core.ndim != 1:
        raise ConfigurationError(
            f"clocks and values must be equally long: {core.shape}, {memory.shape}, {y.shape}"
        )
    if not all(np.all(np.isfinite(item) & (item > 0)) for item in (core, memory, y)):
        raise ConfigurationError("clocks and values must be positive")
    if len(y) < 4 or len(np.unique(core)) < 2 or len(np.unique(memory)) < 2:
        raise ConfigurationError(
            "core and memory clock together need four points at least, at two core and two memory "
            f"clocks; there are {len(y)} points, {len(np.unique(core))} core and "
            f"{len(np.unique(memory))} memory clocks"
        )
    first, second = _columns(quantity, core, memory)
    matrix = np.stack([first, second, np.ones_like(first)], axis=1) / y[:, None]
    scale = matrix.max(axis=0)
    solution, distance = nnls(matrix / scale, np.ones_like(y))
    a, b, c = (solution / scale).tolist()
    return JointFit(
        quantity=quantity, core=a, memory=b, constant=c, rms=float(distance / np.sqrt(len(y)))
    )
