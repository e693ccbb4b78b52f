"""Least squares for separable forms, many curves at a time.

Notation: n clocks, R curves (rows), G trial shapes.

    f      (n,)    clocks, MHz
    y      (R, n)  measurements
    w      (R, n)  weights; 0 leaves a point out
    s      (R, k)  shape parameters

For a given shape, a and c have a closed form (2 x 2 normal equations, with the bounds a, c >= 0), so only
the shape is searched: on a grid within its bounds, then on grids that shrink around the best point
(variable projection; Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973). Nothing depends on a starting
point, and the grid serves all rows with four matrix products.

Errors are relative: with w = 1 / y^2 the sum of squares is that of (prediction - y) / y.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from tvm_energy.dvfs.forms import PRIOR_ERROR, Array, Form

#: Each refinement looks at this many points a dimension, over two steps of the grid before.
_ZOOM_POINTS = 7
_ZOOMS = 5

#: Rows that the first grid of a shared shape looks at, about.
_GRID_ROWS = 32


@dataclass(frozen=True, slots=True)
class Solution:
    """The fit of each row: a (R,), c (R,), s (R, k), and the weighted sum of squares (R,)."""

    a: Array
    c: Array
    s: Array
    squares: Array

    def predict(self, form: Form, f: Array) -> Array:
        """Values at clocks f of shape (n,) or (R, n): shape (R, n)."""
        return self.a[:, None] * form.phi(f, self.s[:, None, :]) + self.c[:, None]

    def rows(self, chosen: slice) -> Solution:
        """Some of the rows."""
        return Solution(self.a[chosen], self.c[chosen], self.s[chosen], self.squares[chosen])


def solve(form: Form, f: Array, y: Array, w: Array, *, refine: bool = True) -> Solution:
    """Fit one form to every row, each with a shape of its own.

    Args:
        form: what to fit.
        f: clocks, MHz, shape (n,).
        y: measurements, shape (R, n).
        w: weights, shape (R, n).
        refine: search finer than the first grid.
    """
    grid, axes = _grid(form, f)
    scale, a, c, squares = _on_grid(form, f, grid, y, w)
    low, high = float(f.min()), float(f.max())
    best = np.argmin(squares + _penalty(form, grid, low, high)[:, None], axis=0)
    rows = np.arange(len(y))
    found = Solution(a[best, rows] / scale[best], c[best, rows], grid[best], squares[best, rows])
    return _refined(form, f, y, w, found) if refine and axes else found


def solve_shared(form: Form, f: Array, y: Array, w: Array, *, refine: bool = True) -> Solution:
    """Fit one form to every row, all rows with the same shape.

    For what belongs to the device and not to the workload: its voltage curve. Arguments as in `solve`.
    """
    low, high = float(f.min()), float(f.max())
    grid, axes = _grid(form, f)
    reach = np.array([axis[1] - axis[0] for axis in axes])
    bounds = np.array(form.bounds(low, high))
    # The large first grid looks at some of many rows; what it finds is refined on all of them.
    rows = slice(None, None, -(-len(y) // _GRID_ROWS))
    best = grid[0]
    for _ in range(_ZOOMS + 1 if refine else 1):
        squares = _on_grid(form, f, grid, y[rows], w[rows])[3].mean(axis=1)
        best = grid[int(np.argmin(squares + _penalty(form, grid, low, high) / len(y)))]
        grid = np.clip(best + _offsets(len(axes)) * reach, bounds[:, 0], bounds[:, 1])
        reach = reach * 2 / (_ZOOM_POINTS - 1)
        rows = slice(None)
    return solve_fixed(form, f, y, w, best)


def solve_fixed(form: Form, f: Array, y: Array, w: Array, shape: Array) -> Solution:
    """Fit a and c of every row under a given shape (k,)."""
    scale, a, c, squares = _on_grid(form, f, shape[None], y, w)
    return Solution(a[0] / scale[0], c[0], np.tile(shape, (len(y), 1)), squares[0])


def _grid(form: Form, f: Array) -> tuple[Array, list[Array]]:
    """Trial shapes (G, k) within the bounds, and the axes that they are made of."""
    axes = [
        np.linspace(*bound, count)
        for bound, count in zip(
            form.bounds(float(f.min()), float(f.max())), form.steps, strict=True
        )
    ]
    return (np.array(list(itertools.product(*axes))) if axes else np.zeros((1, 1))), axes


def _offsets(dimensions: int) -> Array:
    """Points of a grid from -1 to 1, shape (Z, k)."""
    return np.array(list(itertools.product(np.linspace(-1, 1, _ZOOM_POINTS), repeat=dimensions)))


def _on_grid(
    form: Form, f: Array, grid: Array, y: Array, w: Array
) -> tuple[Array, Array, Array, Array]:
    """Scale of phi (G,), and a, c and squares of every row under every trial shape, (G, R)."""
    phi = form.phi(f, grid[:, None, :])
    scale = np.abs(phi).max(axis=-1)
    phi = phi / scale[:, None]
    wy = w * y
    sums = (
        products(phi, w),
        products(phi**2, w),
        w.sum(axis=1)[None, :],
        products(phi, wy),
        wy.sum(axis=1)[None, :],
        (wy * y).sum(axis=1)[None, :],
    )
    return (scale, *_linear(form, *sums))


def products(left: Array, right: Array) -> Array:
    """``left @ right.T``, without the threads of BLAS, which cost more than they give at these sizes."""
    return np.asarray(np.einsum("gn,rn->gr", left, right))


def _linear(
    form: Form, sp: Array, spp: Array, s1: Array, spy: Array, sy: Array, syy: Array
) -> tuple[Array, Array, Array]:
    """The best a, c >= 0 and their weighted sum of squares, from the weighted sums of products."""
    tiny = np.finfo(float).tiny
    slope_only = np.maximum(0.0, spy / np.maximum(spp, tiny))
    if not form.intercept:
        a, c = slope_only, np.zeros_like(slope_only)
    else:
        determinant = spp * s1 - sp**2
        safe = np.where(determinant > 1e-13 * spp * s1, determinant, np.inf)
        a = (spy * s1 - sp * sy) / safe
        c = (sy - a * sp) / np.maximum(s1, tiny)
        flat = a < 0
        a, c = np.where(flat, 0.0, a), np.where(flat, sy / np.maximum(s1, tiny), c)
        through_zero = c < 0
        a, c = np.where(through_zero, slope_only, a), np.where(through_zero, 0.0, c)
    squares = syy - 2 * a * spy - 2 * c * sy + a * a * spp + 2 * a * c * sp + c * c * s1
    return a, c, np.maximum(squares, 0.0)


def _penalty(form: Form, s: Array, low: float, high: float) -> Array:
    """What the prior adds to the sum of squares, for shapes (..., k)."""
    total = np.zeros(s.shape[:-1])
    for index, (mean, deviation) in enumerate(form.prior(low, high)):
        total += ((s[..., index] - mean) / deviation) ** 2
    return np.asarray(total * PRIOR_ERROR**2)


def _refined(form: Form, f: Array, y: Array, w: Array, found: Solution) -> Solution:
    """Shrinking grids around each row's best shape."""
    low, high = float(f.min()), float(f.max())
    bounds = np.array(form.bounds(low, high))  # (k, 2)
    reach = (bounds[:, 1] - bounds[:, 0]) / (np.array(form.steps) - 1)
    offsets = _offsets(len(bounds))
    rows = np.arange(len(y))
    for _ in range(_ZOOMS):
        trial = found.s[:, None, :] + offsets * reach  # (R, Z, k)
        trial = np.clip(trial, bounds[:, 0], bounds[:, 1])
        phi = form.phi(f, trial[:, :, None, :])  # (R, Z, n)
        scale = phi.max(axis=-1, keepdims=True)
        phi = phi / scale
        wy = w * y
        a, c, squares = _linear(
            form,
            np.einsum("rzn,rn->rz", phi, w),
            np.einsum("rzn,rzn,rn->rz", phi, phi, w),
            w.sum(axis=1)[:, None],
            np.einsum("rzn,rn->rz", phi, wy),
            wy.sum(axis=1)[:, None],
            (wy * y).sum(axis=1)[:, None],
        )
        best = np.argmin(squares + _penalty(form, trial, low, high), axis=1)
        found = Solution(
            a[rows, best] / scale[rows, best, 0],
            c[rows, best],
            trial[rows, best],
            squares[rows, best],
        )
        reach = reach * 2 / (_ZOOM_POINTS - 1)
    return found
