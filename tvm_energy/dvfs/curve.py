"""A fitted curve: latency or power of one workload over the clock, with its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tvm_energy.dvfs.forms import LATENCY_FORMS, POWER_FORMS, PRIOR_ERROR, Array, Form

#: Coverage of intervals and bands.
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCurve:
    """Latency (s) or power (W) over the requested core clock (MHz).

    Attributes:
        quantity: ``latency`` or ``power``.
        form: name of the form, or ``table``: a monotone cubic (Fritsch and Carlson's, PCHIP) through the
            measured points, for latency through its cycles t f, which a/f + c makes a straight line.
        coefficients: a, c and shape, by name; for ``table`` those of the form that leads on beyond the
            measured range.
        cap_mhz: above it the effective clock rises no further (power cap, clock ceiling); infinite when
            nothing of that kind was seen.
        clock_mhz, values: what was fitted, by ascending effective clock, shapes (n,).
        noise: relative standard error of each measurement, as far as known, else 0.
        rms: relative root mean square residual of the points.
        left_out: relative root mean square error of cross-validation, by form; only forms that the number
            of clocks supports.
        beyond: for ``table``, the form that leads on beyond the measured range.
        alternatives: forms that the points cannot tell from the chosen one.
    """

    quantity: str
    form: str
    coefficients: Mapping[str, float]
    cap_mhz: float
    clock_mhz: Array
    values: Array
    noise: float
    rms: float
    left_out: Mapping[str, float]
    beyond: FittedCurve | None = None
    alternatives: tuple[FittedCurve, ...] = field(default=(), repr=False)

    @property
    def left_out_error(self) -> float:
        """Relative error of the chosen form at points left out of its fit; NaN when none could be."""
        return self.left_out.get(self.form, float("nan"))

    @property
    def formula(self) -> str:
        """For people."""
        shape = self._shape_form
        if shape is not None:
            return shape.formula
        return "monotone cubic through the points"

    @property
    def _shape_form(self) -> Form | None:
        return LATENCY_FORMS.get(self.form) or POWER_FORMS.get(self.form)

    def effective_mhz(self, clock_mhz: Array | float) -> Array:
        """The clock that the device runs at when this one is requested."""
        return np.asarray(np.minimum(np.asarray(clock_mhz, dtype=float), self.cap_mhz))

    def predict(self, clock_mhz: Array | float) -> Array:
        """Values at requested clocks, of their shape."""
        f = self.effective_mhz(clock_mhz)
        if self._shape_form is None:
            return self._interpolated(f)
        shape = np.array(
            [self.coefficients[name] for name in self._shape_form.shape_names] or [0.0]
        )
        phi = self._shape_form.phi(f, shape)
        return np.asarray(self.coefficients["a"] * phi + self.coefficients.get("c", 0.0))

    def _interpolated(self, f: Array) -> Array:
        assert self.beyond is not None
        low, high = self.clock_mhz[0], self.clock_mhz[-1]
        inside = np.clip(f, low, high)
        values = interpolate(self.quantity, self.clock_mhz, self.values, inside)
        # Beyond the range: the form's course, from the last point on.
        return values * self.beyond.predict(f) / self.beyond.predict(inside)

    def through_points(self, clock_mhz: Array | float) -> Array:
        """`predict`, corrected by what it misses the measured points by, interpolated between them."""
        f = np.clip(self.effective_mhz(clock_mhz), self.clock_mhz[0], self.clock_mhz[-1])
        missed = self.values / self.predict(self.clock_mhz)
        return self.predict(clock_mhz) * interpolate("ratio", self.clock_mhz, missed, f)

    def half_width(self, clock_mhz: Array | float) -> Array:
        """Half width of the 95 % band at requested clocks.

        The statistical error of the chosen form, and how far the forms go apart that the points cannot
        tell from it.
        """
        f = np.asarray(clock_mhz, dtype=float)
        centre = self.predict(f)
        apart = np.zeros_like(centre)
        for other in self.alternatives:
            apart = np.maximum(apart, np.abs(other.predict(f) - centre))
        return np.hypot(self._statistical(f), apart)

    def _statistical(self, clock_mhz: Array) -> Array:
        f = self.effective_mhz(clock_mhz)
        if self._shape_form is None:
            return self._table_error(f)
        covariance, quantile = self._covariance()
        slopes = self._slopes(f)
        variance = np.einsum("...i,ij,...j->...", slopes, covariance, slopes)
        return np.asarray(quantile * np.sqrt(np.maximum(variance, 0.0)))

    def _table_error(self, f: Array) -> Array:
        """Noise at the points; between them, the error left out: that of a gap twice as wide."""
        index = np.clip(np.searchsorted(self.clock_mhz, f) - 1, 0, len(self.clock_mhz) - 2)
        start, end = self.clock_mhz[index], self.clock_mhz[index + 1]
        part = np.clip((f - start) / (end - start), 0.0, 1.0)
        beyond = (f < self.clock_mhz[0]) | (f > self.clock_mhz[-1])
        between = np.where(beyond, 1.0, 4 * part * (1 - part))
        return np.asarray(
            self.predict(f) * np.hypot(1.96 * self.noise, between * self.left_out_error)
        )

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % confidence interval of each coefficient, cut at the bounds of the form; none for a table.

        Student's t: with few clocks more than parameters they are wide, as they should be.
        """
        shape = self._shape_form
        if shape is None:
            return {}
        covariance, quantile = self._covariance()
        limits = [(0.0, np.inf)] * (1 + shape.intercept)
        limits += shape.bounds(float(self.clock_mhz[0]), float(self.clock_mhz[-1]))
        result = {}
        for index, name in enumerate(shape.names):
            half = quantile * float(np.sqrt(max(covariance[index, index], 0.0)))
            value = self.coefficients[name]
            low, high = limits[index]
            result[name] = (max(low, value - half), min(high, value + half))
        return result

    def _slopes(self, f: Array) -> Array:
        """Derivatives of the prediction by (a, c, s), shape (..., parameters)."""
        shape = self._shape_form
        assert shape is not None
        s = np.array([self.coefficients[name] for name in shape.shape_names] or [0.0])
        columns = [shape.phi(f, s)]
        if shape.intercept:
            columns.append(np.ones_like(columns[0]))
        low, high = float(self.clock_mhz[0]), float(self.clock_mhz[-1])
        for index, (lower, upper) in enumerate(shape.bounds(low, high)):
            step = 1e-4 * (upper - lower)
            up, down = s.copy(), s.copy()
            up[index], down[index] = min(upper, s[index] + step), max(lower, s[index] - step)
            slope = (shape.phi(f, up) - shape.phi(f, down)) / (up[index] - down[index])
            columns.append(self.coefficients["a"] * slope)
        return np.stack(columns, axis=-1)

    def _covariance(self) -> tuple[Array, float]:
        """Of (a, c, s), and the quantile of Student's t that belongs to it."""
        from scipy.stats import t as student

        shape = self._shape_form
        assert shape is not None
        relative = self._slopes(self.effective_mhz(self.clock_mhz)) / self.values[:, None]
        scale = np.abs(relative).max(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        relative = relative / scale
        freedom = len(self.clock_mhz) - shape.parameters
        variance = max(
            self.noise**2, self.rms**2 * len(self.clock_mhz) / freedom if freedom > 0 else 0.0
        )
        information = relative.T @ relative
        fixed = 1 + shape.intercept
        low, high = float(self.clock_mhz[0]), float(self.clock_mhz[-1])
        for index, (_, deviation) in enumerate(shape.prior(low, high)):
            # Also where a = 0, and the points say nothing about the shape.
            information[fixed + index, fixed + index] += (
                PRIOR_ERROR / deviation / scale[fixed + index]
            ) ** 2
        covariance = variance * np.linalg.pinv(information) / np.outer(scale, scale)
        quantile = float(student.ppf((1 + CONFIDENCE) / 2, max(1, freedom)))
        return covariance, quantile


def interpolate(quantity: str, clock_mhz: Array, values: Array, at_mhz: Array) -> Array:
    """Monotone cubic through points; values of shape (..., n), result (..., at)."""
    from scipy.interpolate import PchipInterpolator

    cycles = clock_mhz if quantity == "latency" else 1.0
    spline = PchipInterpolator(clock_mhz, values * cycles, axis=-1)
    return np.asarray(spline(at_mhz) / (at_mhz if quantity == "latency" else 1.0))
