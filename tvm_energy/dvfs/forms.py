"""The forms that latency and power may take over the clock: formula, units, source.

All of them are *separable*, ``y = c + a phi(f; s)``: linear in ``a`` and ``c``, with at most two further
*shape* parameters ``s``. So they share one fitting method (`tvm_energy.dvfs.separable`), and a form is
nothing but ``phi``, bounds of ``s`` and a weak prior on it.

Clocks f are in MHz, latency in seconds, power in watts. Sources:

    Han, Nan, Zhou, Niu: DVFS-Aware DNN Inference on GPUs, arXiv:2502.06295 (ICC 2025)
    Schoonhoven, Veenboer, van Werkhoven, Batenburg: Going green, arXiv:2211.07260 (PMBS 2022)

The first names a latency model with coefficients a, b, c, but the one copy of its formula that we could
read has lost its layout; `POWER_LAW` and `SHIFTED` are the two readings that make sense, and both are
here. `OFFSET`, the case that they share (b = 1, b = 0), is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError

Array = NDArray[np.float64]

#: Ridge over highest clock: 1025 of 1410 MHz on an A100, 1290 of 1800 on an RTX A4000 (arXiv:2211.07260).
RIDGE_SHARE = 0.72


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A separable form, ``y = c + a phi(f; s)`` with ``a, c >= 0``.

    Attributes:
        name: as users write it.
        formula: for people.
        intercept: whether there is a c.
        shape_names: names of s.
        bounds: from the clocks' (lowest, highest): lower and upper bound of each s.
        steps: grid points of each s in the first search.
        phi: f of shape (..., n) and s of shape (..., 1, k) to the shape (..., n) of their broadcast.
        shared: whether s belongs to the device, so that all workloads measured on it have the same.
        prior: mean and deviation of each s, from (lowest, highest); weighs like measurements with a
            relative error of `PRIOR_ERROR`.
    """

    name: str
    formula: str
    intercept: bool
    shape_names: tuple[str, ...] = ()
    bounds: Callable[[float, float], tuple[tuple[float, float], ...]] = lambda low, high: ()
    steps: tuple[int, ...] = ()
    phi: Callable[[Array, Array], Array]
    shared: bool = False
    prior: Callable[[float, float], tuple[tuple[float, float], ...]] = lambda low, high: ()

    @property
    def parameters(self) -> int:
        """How many numbers are fitted."""
        return 1 + self.intercept + len(self.shape_names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coefficients: a, c where there is one, the shape."""
        return ("a", *(("c",) if self.intercept else ()), *self.shape_names)


#: Relative error of a measurement that pulls as strongly as a prior one deviation away.
PRIOR_ERROR = 1e-3


def _inverse(f: Array, s: Array) -> Array:
    return 1 / f + 0 * s[..., 0]


def _cube(f: Array, s: Array) -> Array:
    return f**3 + 0 * s[..., 0]


def ridge_voltage(clock_mhz: Array, ridge_mhz: Array | float, beta: Array | float) -> Array:
    """Voltage over its lowest value: 1 up to the ridge, then 1 + beta (f - ridge) / 1000."""
    return np.asarray(1 + 1e-3 * beta * np.maximum(0.0, clock_mhz - ridge_mhz), dtype=float)


CPU = Form(
    name="cpu",
    # The CPU-DVFS model that arXiv:2502.06295 argues against: cycles over frequency.
    formula="t = a / f",
    intercept=False,
    phi=_inverse,
)

OFFSET = Form(
    name="offset",
    # a: cycles that scale with the core clock; c: time that does not (memory, launch).
    formula="t = a / f + c",
    intercept=True,
    phi=_inverse,
)

POWER_LAW = Form(
    name="power",
    # arXiv:2502.06295, first reading.
    formula="t = a f^-b + c",
    intercept=True,
    shape_names=("b",),
    bounds=lambda low, high: ((0.1, 6.0),),
    steps=(40,),
    phi=lambda f, s: np.exp(-s[..., 0] * np.log(f)),
    prior=lambda low, high: ((1.0, 1.0),),
)

SHIFTED = Form(
    name="shifted",
    # arXiv:2502.06295, second reading.
    formula="t = a / (f - b) + c",
    intercept=True,
    shape_names=("b",),
    bounds=lambda low, high: ((-2 * low, 0.95 * low),),
    steps=(40,),
    phi=lambda f, s: 1 / (f - s[..., 0]),
    prior=lambda low, high: ((0.0, low),),
)

CUBIC = Form(
    name="cubic",
    # arXiv:2502.06295: e = kappa f^3 t, so P = kappa f^3; a is kappa.
    formula="P = a f^3",
    intercept=False,
    phi=_cube,
)

STATIC = Form(
    name="static",
    # The same with static power c.
    formula="P = a f^3 + c",
    intercept=True,
    phi=_cube,
)

RIDGE = Form(
    name="ridge",
    # arXiv:2211.07260: P = P_idle + alpha f v(f)^2; c is P_idle, a is alpha. The voltage curve is the
    # device's; that all its workloads share it in a fit is ours.
    formula="P = a f v^2 + c, v = 1 + beta max(0, f - ridge) / 1000",
    intercept=True,
    shape_names=("ridge", "beta"),
    bounds=lambda low, high: ((low, high), (0.0, 3.0e3 / high)),
    shared=True,
    steps=(41, 26),
    phi=lambda f, s: f * ridge_voltage(f, s[..., 0], s[..., 1]) ** 2,
    # beta: voltage at the highest clock about 1.3 times the lowest.
    prior=lambda low, high: (
        (RIDGE_SHARE * high, 0.05 * high),
        (0.3e3 / ((1 - RIDGE_SHARE) * high), 0.3e3 / high),
    ),
)

LATENCY_FORMS = MappingProxyType({form.name: form for form in (CPU, OFFSET, POWER_LAW, SHIFTED)})
POWER_FORMS = MappingProxyType({form.name: form for form in (CUBIC, STATIC, RIDGE)})

#: The form without a formula: a monotone cubic through the measured points.
TABLE = "table"


def find_form(name: str, forms: MappingProxyType[str, Form]) -> Form:
    """The form of that name.

    Raises:
        ConfigurationError: unknown; the message lists the known ones.
    """
    if name not in forms:
        raise ConfigurationError(f"unknown form {name!r}; there are {', '.join(forms)}, {TABLE}")
    return forms[name]
