"""Fits latency and power over the clock, and chooses the form.

    measured points -> cap of the effective clock -> every form that the points support
                    -> cross-validation -> the simplest form that predicts points left out as well as any

The *cap*: where the power limit is reached, the device runs slower than requested. Time and power then
stay flat over the requested clock, and a fit that did not know it would bend its coefficients. So forms are
fitted over the *effective* clock min(f, cap).

*Support*: a form needs more clocks than it has parameters; only with two clocks is a one-parameter form
all that can be said, and one clock says nothing about the others. Confidence intervals use Student's t, so
a fit with one degree of freedom has the wide band that it deserves.

Cross-validation leaves out each clock between the lowest and the highest in turn (five interleaved groups
when there are many), since predicting between measured clocks is what the fit is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tvm_energy.dvfs.curve import FittedCurve, interpolate
from tvm_energy.dvfs.forms import (
    LATENCY_FORMS,
    POWER_FORMS,
    POWER_LAW,
    TABLE,
    Array,
    Form,
    find_form,
)
from tvm_energy.dvfs.separable import Solution, products, solve, solve_fixed, solve_shared
from tvm_energy.errors import ConfigurationError

#: Relative error of a measurement when nothing is known about it: what repeated runs at a locked clock
#: scatter by at best.
DEFAULT_NOISE = 1e-3

#: Points that an interpolating table needs, so that one can be left out.
_TABLE_POINTS = 4

#: A simpler form is taken when its error left out is at most this many times the least one.
_AS_GOOD = 1.1

#: Forms with an error left out up to this many times the least one count as alternatives.
_PLAUSIBLE = 2.0

#: Share of the power limit from which on a point counts as capped.
_AT_LIMIT = 0.985

_MOST_FOLDS = 5

#: Cross-validation of more numbers than this is left at the first grid of shapes.
_FEW = 4096


def fit_latency(
    clock_mhz: ArrayLike,
    latency_s: ArrayLike,
    *,
    form: str | None = None,
    cap_mhz: float | None = None,
    noise: float = 0.0,
) -> FittedCurve:
    """Fit latency over the core clock.

    Args:
        clock_mhz: different clocks, MHz, shape (n,), in any order.
        latency_s: seconds, shape (n,).
        form: ``cpu``, ``offset``, ``power``, ``shifted`` or ``table``; None lets cross-validation choose.
        cap_mhz: highest effective clock, where known; None looks for one in the data.
        noise: relative standard error of one latency, where known.

    Raises:
        ConfigurationError: fewer clocks than the form needs, or values that are no latencies.
    """
    return fit_latencies(
        clock_mhz, np.atleast_2d(latency_s), form=form, cap_mhz=cap_mhz, noise=noise
    )[0]


def fit_power(
    clock_mhz: ArrayLike,
    power_w: ArrayLike,
    *,
    form: str | None = None,
    cap_mhz: float | None = None,
    noise: float = 0.0,
) -> FittedCurve:
    """Fit power over the core clock; as `fit_latency`, with ``cubic``, ``static``, ``ridge``, ``table``.

    Without ``cap_mhz`` no cap is looked for: hand over the one of the latency curve.
    """
    return fit_powers(
        clock_mhz, np.atleast_2d(power_w), form=form, cap_mhz=[cap_mhz or np.inf], noise=noise
    )[0]


def fit_latencies(
    clock_mhz: ArrayLike,
    latency_s: ArrayLike,
    *,
    form: str | None = None,
    cap_mhz: float | None = None,
    power_w: ArrayLike | None = None,
    power_limit_w: float | None = None,
    noise: float = 0.0,
) -> list[FittedCurve]:
    """Fit the latencies of many workloads (blocks, kernels) measured at the same clocks.

    Args:
        clock_mhz: shape (n,).
        latency_s: shape (R, n).
        form, cap_mhz, noise: see `fit_latency`.
        power_w: shape (R, n); with ``power_limit_w`` it tells where the cap begins.
        power_limit_w: power limit of the device.
    """
    f, y = _checked(clock_mhz, latency_s, "latency_s")
    power = None if power_w is None else _checked(clock_mhz, power_w, "power_w")[1]
    if cap_mhz is not None:
        caps = np.full(len(y), float(cap_mhz))
    else:
        caps = find_caps(f, y, power, power_limit_w, noise)
    return _fit_all("latency", LATENCY_FORMS, f, y, caps, form, noise)


def fit_powers(
    clock_mhz: ArrayLike,
    power_w: ArrayLike,
    *,
    form: str | None = None,
    cap_mhz: Sequence[float] | Array | None = None,
    noise: float = 0.0,
) -> list[FittedCurve]:
    """Fit the powers of many workloads; ``cap_mhz`` has one cap each (infinite: none), shape (R,)."""
    f, y = _checked(clock_mhz, power_w, "power_w")
    caps = np.full(len(y), np.inf) if cap_mhz is None else np.asarray(cap_mhz, dtype=float)
    return _fit_all("power", POWER_FORMS, f, y, caps, form, noise)


def _checked(clock_mhz: ArrayLike, values: ArrayLike, name: str) -> tuple[Array, Array]:
    """Clocks ascending and values in their order; refuses what cannot be fitted."""
    f = np.asarray(clock_mhz, dtype=float)
    y = np.atleast_2d(np.asarray(values, dtype=float))
    if f.ndim != 1 or y.ndim != 2 or y.shape[1] != len(f):
        raise ConfigurationError(
            f"{name} of shape {y.shape} does not belong to clocks of shape {f.shape}"
        )
    for what, numbers in (("clock_mhz", f), (name, y)):
        if not np.all(np.isfinite(numbers) & (numbers > 0)):
            wrong = numbers[~(np.isfinite(numbers) & (numbers > 0))][0]
            raise ConfigurationError(f"{what} must be positive, got {wrong:g}")
    order = np.argsort(f, kind="stable")
    f, y = f[order], y[:, order]
    if np.any(np.diff(f) == 0):
        twice = f[1:][np.diff(f) == 0][0]
        raise ConfigurationError(f"clock {twice:g} MHz is there twice; average its values first")
    if len(f) < 2:
        raise ConfigurationError(
            f"one clock ({', '.join(f'{clock:g} MHz' for clock in f) or 'none'}) says nothing about "
            "the others; measure at two clocks at least, better five"
        )
    return f, y


# ---- the cap --------------------------------------------------------------------------------------


def find_caps(
    f: Array,
    latency_s: Array,
    power_w: Array | None,
    power_limit_w: float | None,
    noise: float = 0.0,
) -> Array:
    """The highest effective clock of each workload, MHz, shape (R,); infinite where there is none.

    Fits ``a / min(f, cap) + c`` for trial caps. A cap is believed when it explains the latencies better by
    more than noise, and either two measured clocks above it show it (latency flat, and power too, where
    known), or power is at the known limit there.
    """
    points = len(f)
    if points < 4:
        return np.full(len(latency_s), np.inf)
    start = max(1, points - 32)
    trial = np.unique(
        np.concatenate([np.linspace(f[i - 1], f[i], 5)[1:] for i in range(start, points)])
    )
    limited = np.zeros(latency_s.shape, dtype=bool)
    if power_w is not None and power_limit_w:
        limited = power_w >= _AT_LIMIT * power_limit_w
    squares, slope, _ = _capped_offsets(np.minimum(f, trial[:, None]), latency_s)
    free = squares[-1]  # the last trial is the highest clock: no cap
    # A cap lies above every clock whose power is below the limit.
    if limited.any():
        below = np.where(limited, f[0], f).max(axis=1)
        first = np.where(limited, f, np.inf).min(axis=1)
        outside = (trial[:, None] <= below) | (trial[:, None] > first)
        squares = np.where(outside & np.isfinite(first), np.inf, squares)
    best = np.argmin(squares, axis=0)
    rows = np.arange(len(latency_s))
    cap = trial[best]
    scatter = np.sqrt(squares[best, rows] / (points - 3))
    sigma = np.maximum(scatter, max(noise, DEFAULT_NOISE))
    better = free - squares[best, rows] > 9 * sigma**2
    above = f[None, :] > cap[:, None] * (1 + 1e-9)
    believed = better & (_flat(f, latency_s, power_w, above, slope[best, rows], sigma))
    # A steep power law is no better described by a cap.
    shown = np.flatnonzero(believed)
    steep = solve(POWER_LAW, f, latency_s[shown], 1 / latency_s[shown] ** 2).squares
    believed[shown] = steep - squares[best, rows][shown] > 9 * sigma[shown] ** 2
    believed |= (free >= squares[best, rows]) & (limited & above).any(axis=1)
    return np.where(believed, cap, np.inf)


def _capped_offsets(f: Array, y: Array) -> tuple[Array, Array, Array]:
    """Weighted squares, a and c of a/f + c for trial clocks f (C, n) and latencies (R, n): (C, R)."""
    w, phi = 1 / y**2, 1 / f
    sp, spp, s1 = products(phi, w), products(phi**2, w), w.sum(axis=1)
    spy, sy = products(phi, w * y), (w * y).sum(axis=1)
    determinant = np.maximum(spp * s1 - sp**2, 1e-300)
    a = np.maximum(0.0, (spy * s1 - sp * sy) / determinant)
    c = np.maximum(0.0, (sy - a * sp) / s1)
    a = np.where(c == 0, spy / spp, a)
    squares = y.shape[1] - 2 * a * spy - 2 * c * sy + a * a * spp + 2 * a * c * sp + c * c * s1
    return np.maximum(squares, 0.0), a, c


def _flat(
    f: Array, latency_s: Array, power_w: Array | None, above: Array, slope: Array, sigma: Array
) -> Array:
    """Whether at least two clocks lie above the cap, and latency and power are flat over them."""
    spread = _spread(latency_s, above)
    lowest = np.where(above, f, np.inf).min(axis=1)
    fastest = np.where(above, latency_s, np.inf).min(axis=1)
    with np.errstate(invalid="ignore"):
        expected = slope * (1 / lowest - 1 / f[-1]) / fastest
        flat = (above.sum(axis=1) >= 2) & (spread <= np.maximum(3 * sigma, 0.25 * expected))
    if power_w is not None:
        flat &= _spread(power_w, above) <= 0.03
    return np.asarray(flat)


def _spread(values: Array, chosen: Array) -> Array:
    """Relative range of the chosen values of each row; 0 where none is chosen."""
    top = np.where(chosen, values, -np.inf).max(axis=1)
    bottom = np.where(chosen, values, np.inf).min(axis=1)
    return np.where(chosen.any(axis=1), top / np.where(chosen.any(axis=1), bottom, 1.0) - 1, 0.0)


# ---- forms and their choice -----------------------------------------------------------------------


def _fit_all(
    quantity: str,
    forms: MappingProxyType[str, Form],
    f: Array,
    y: Array,
    caps: Array,
    form: str | None,
    noise: float,
) -> list[FittedCurve]:
    """Group the rows by their cap, since the rows of one group share effective clocks."""
    weights = np.where(f <= caps[:, None], 1 / y**2, 0.0)
    shapes = {
        name: solve_shared(shape, f, y, weights).s[0]
        for name, shape in forms.items()
        if shape.shared and len(y) > 1
    }
    curves: list[FittedCurve | None] = [None] * len(y)
    for cap in np.unique(caps):
        rows = np.flatnonzero(caps == cap)
        fitted = _fit_group(quantity, forms, f, y[rows], float(cap), form, noise, shapes)
        for row, curve in zip(rows, fitted, strict=True):
            curves[row] = curve
    return [curve for curve in curves if curve is not None]


def _fit_group(
    quantity: str,
    forms: MappingProxyType[str, Form],
    f: Array,
    y: Array,
    cap: float,
    wanted: str | None,
    noise: float,
    shapes: dict[str, Array],
) -> list[FittedCurve]:
    effective = np.minimum(f, cap)
    supported = supported_forms(len(np.unique(effective)), forms, wanted, tuple(shapes))
    parametric = [name for name in supported if name != TABLE]
    folds = _folds(len(f))
    solutions: dict[str, Solution] = {}
    errors: dict[str, Array] = {}
    w = 1 / y**2
    for name in parametric:
        shape = forms[name]
        if name in shapes:
            solutions[name] = solve_fixed(shape, effective, y, w, shapes[name])
        else:
            solutions[name] = solve(shape, effective, y, w)
        errors[name] = _left_out(shape, effective, y, w, folds)
    if TABLE in supported:
        errors[TABLE] = _table_left_out(quantity, f, y, folds)
    return [
        _choose(quantity, forms, f, y[row], cap, noise, solutions, errors, row, wanted)
        for row in range(len(y))
    ]


def supported_forms(
    clocks: int,
    forms: MappingProxyType[str, Form],
    wanted: str | None = None,
    shared: Sequence[str] = (),
) -> list[str]:
    """Forms that so many different clocks support, the simplest first.

    Args:
        clocks: different effective clocks.
        forms: to choose from.
        wanted: the only one of interest.
        shared: forms whose shape many workloads have in common, so that it takes none of their clocks.

    Raises:
        ConfigurationError: ``wanted`` is not among them.
    """
    parameters = {
        name: form.parameters - (len(form.shape_names) if name in shared else 0)
        for name, form in forms.items()
    }
    names = [
        name for name, count in parameters.items() if count < clocks or (count == 1 and clocks == 2)
    ]
    if clocks >= _TABLE_POINTS:
        names.append(TABLE)
    if wanted is None:
        return names
    needed = _TABLE_POINTS if wanted == TABLE else parameters[find_form(wanted, forms).name] + 1
    if wanted not in names:
        raise ConfigurationError(
            f"the form {wanted!r} needs {needed} different effective clocks at least, there are "
            f"{clocks}; measure more, or take {', '.join(names)}"
        )
    # A table needs a form to lead on beyond its ends.
    return [wanted] if wanted != TABLE else names


def _folds(points: int) -> list[NDArray[np.intp]]:
    """Indices that are left out together; the ends are always kept."""
    inner = np.arange(1, points - 1)
    count = min(_MOST_FOLDS, len(inner)) if len(inner) > 2 * _MOST_FOLDS else len(inner)
    return [inner[start::count] for start in range(count)]


def _left_out(form: Form, f: Array, y: Array, w: Array, folds: list[NDArray[np.intp]]) -> Array:
    """Relative root mean square error at points left out, shape (R,); all folds in one fit."""
    if not folds or len(f) - max(len(fold) for fold in folds) < max(2, form.parameters - 1):
        return np.full(len(y), np.nan)
    if form.shared:
        return _shared_left_out(form, f, y, w, folds)
    weights = np.repeat(w[None], len(folds), axis=0)
    for index, fold in enumerate(folds):
        weights[index][:, fold] = 0.0
    repeated = np.tile(y, (len(folds), 1))
    fitted = solve(form, f, repeated, weights.reshape(-1, len(f)), refine=repeated.size <= _FEW)
    predicted = fitted.predict(form, f).reshape(len(folds), len(y), len(f))
    squares = np.concatenate(
        [(predicted[i][:, fold] / y[:, fold] - 1) ** 2 for i, fold in enumerate(folds)], axis=1
    )
    return np.asarray(np.sqrt(squares.mean(axis=1)))


def _shared_left_out(
    form: Form, f: Array, y: Array, w: Array, folds: list[NDArray[np.intp]]
) -> Array:
    squares = []
    for fold in folds:
        weights = w.copy()
        weights[:, fold] = 0.0
        predicted = solve_shared(form, f, y, weights, refine=y.size <= _FEW).predict(form, f)
        squares.append((predicted[:, fold] / y[:, fold] - 1) ** 2)
    return np.asarray(np.sqrt(np.concatenate(squares, axis=1).mean(axis=1)))


def _table_left_out(quantity: str, f: Array, y: Array, folds: list[NDArray[np.intp]]) -> Array:
    squares = []
    for fold in folds:
        kept = np.setdiff1d(np.arange(len(f)), fold)
        predicted = interpolate(quantity, f[kept], y[:, kept], f[fold])
        squares.append((predicted / y[:, fold] - 1) ** 2)
    return np.asarray(np.sqrt(np.concatenate(squares, axis=1).mean(axis=1)))


def _choose(
    quantity: str,
    forms: MappingProxyType[str, Form],
    f: Array,
    values: Array,
    cap: float,
    noise: float,
    solutions: dict[str, Solution],
    errors: dict[str, Array],
    row: int,
    wanted: str | None,
) -> FittedCurve:
    """The simplest form as good as the best, with what the points cannot tell from it beside it."""
    left_out = {name: float(found[row]) for name, found in errors.items()}
    curves: dict[str, FittedCurve] = {}
    for name, solution in solutions.items():
        shape = forms[name]
        one = solution.rows(slice(row, row + 1))
        numbers = [one.a[0], *([one.c[0]] if shape.intercept else [])]
        numbers += list(one.s[0][: len(shape.shape_names)])
        curves[name] = FittedCurve(
            quantity=quantity,
            form=name,
            coefficients=dict(zip(shape.names, map(float, numbers), strict=True)),
            cap_mhz=cap,
            clock_mhz=f,
            values=values,
            noise=noise,
            rms=float(np.sqrt(one.squares[0] / len(f))),
            left_out=left_out,
        )
    best = min(curves, key=lambda name: np.nan_to_num(left_out[name], nan=np.inf))
    if TABLE in errors:
        curves[TABLE] = _table(curves[best])
    chosen = wanted or _simplest(left_out, max(noise, DEFAULT_NOISE), list(curves))
    least = left_out[chosen]
    others = tuple(
        curves[name]
        for name in curves
        if name != chosen and left_out[name] <= max(_PLAUSIBLE * least, DEFAULT_NOISE)
    )
    return _with_alternatives(curves[chosen], others)


def _simplest(left_out: dict[str, float], noise: float, names: list[str]) -> str:
    known = {name: left_out[name] for name in names if np.isfinite(left_out[name])}
    if not known:
        return names[0]
    enough = max(_AS_GOOD * min(known.values()), noise)
    return next(name for name, error in known.items() if error <= enough)


def _table(lead: FittedCurve) -> FittedCurve:
    """The interpolating table over the same points."""
    return FittedCurve(
        quantity=lead.quantity,
        form=TABLE,
        coefficients=lead.coefficients,
        cap_mhz=np.inf,
        clock_mhz=lead.clock_mhz,
        values=lead.values,
        noise=lead.noise,
        rms=0.0,
        left_out=lead.left_out,
        beyond=lead,
    )


def _with_alternatives(curve: FittedCurve, others: tuple[FittedCurve, ...]) -> FittedCurve:
    return dataclasses.replace(curve, alternatives=others)
