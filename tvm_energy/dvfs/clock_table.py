"""Latency and energy of blocks at every clock that can be chosen: what the planner decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tvm_energy.errors import ConfigurationError

__all__ = ["ClockTable", "clock_table"]

Floats = NDArray[np.float64]

#: Core clocks outside of this range are taken for another unit.
_CLOCK_RANGE_MHZ = (10.0, 20_000.0)
#: Mean power outside of this range, likewise.
_POWER_RANGE_W = (1e-3, 1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTable:
    """Latency and energy of each block at each clock; made and checked by `clock_table`.

    Attributes:
        clocks_mhz: (n,) different core clocks, ascending.
        latency_s: (blocks, n) seconds of one run of the block, positive; not necessarily falling.
        energy_j: (blocks, n) joules of one run, positive.
        blocks: names, in the order in which the blocks run.
    """

    clocks_mhz: Floats
    latency_s: Floats
    energy_j: Floats
    blocks: tuple[str, ...]

    def whole(self) -> ClockTable:
        """The network as one block: sums over the blocks."""
        return ClockTable(
            clocks_mhz=self.clocks_mhz,
            latency_s=self.latency_s.sum(axis=0, keepdims=True),
            energy_j=self.energy_j.sum(axis=0, keepdims=True),
            blocks=("all",),
        )


def clock_table(
    clocks_mhz: ArrayLike,
    latency_s: ArrayLike,
    *,
    energy_j: ArrayLike | None = None,
    power_w: ArrayLike | None = None,
    blocks: Sequence[str] | None = None,
) -> ClockTable:
    """Check and order the arrays of a table.

    Clocks may come in any order. Columns of the same clock are repeated measurements: they are averaged
    (taking the smallest would reward noise).

    Args:
        clocks_mhz: (n,) core clocks.
        latency_s: (blocks, n), or (n,) for one block.
        energy_j: joules, shaped like ``latency_s``; or
        power_w: mean power in watts; then energy is power times latency.
        blocks: names; numbers from 0 when left out.

    Raises:
        ConfigurationError: shapes that do not fit, neither or both of energy and power, values that are
            not positive and finite, or magnitudes that only another unit explains.
    """
    clocks = np.atleast_1d(np.asarray(clocks_mhz, float))
    latency = np.atleast_2d(np.asarray(latency_s, float))
    if (energy_j is None) == (power_w is None):
        raise ConfigurationError("give either energy_j or power_w, and not both")
    given = np.atleast_2d(np.asarray(energy_j if power_w is None else power_w, float))
    if clocks.ndim != 1 or not clocks.size or not latency.size:
        raise ConfigurationError("the table is empty; it needs at least one block and one clock")
    if latency.shape != given.shape or latency.shape[1:] != clocks.shape:
        raise ConfigurationError(
            f"shapes do not fit: {clocks.size} clocks, latency {latency.shape}, energy or power "
            f"{given.shape}; both must be (blocks, clocks)"
        )
    names = tuple(map(str, range(len(latency)) if blocks is None else blocks))
    if len(names) != len(latency):
        raise ConfigurationError(f"{len(names)} block names for {len(latency)} blocks")
    _check_positive("clock_mhz", clocks[None, :], clocks, ("",))
    _check_positive("latency_s", latency, clocks, names)
    _check_positive("energy_j" if power_w is None else "power_w", given, clocks, names)
    _check_units(clocks, given / latency if power_w is None else given, names)
    different, inverse = np.unique(clocks, return_inverse=True)
    average = np.zeros((clocks.size, different.size))
    average[np.arange(clocks.size), inverse] = 1 / np.bincount(inverse)[inverse]
    energy = given if power_w is None else given * latency
    return ClockTable(
        clocks_mhz=different, latency_s=latency @ average, energy_j=energy @ average, blocks=names
    )


def _check_positive(what: str, values: Floats, clocks: Floats, names: Sequence[str]) -> None:
    bad = np.argwhere(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        block, clock = bad[0]
        where = f" of block {names[block]!r} at {clocks[clock]:g} MHz" if names[block] else ""
        raise ConfigurationError(
            f"{what}{where} must be positive and finite, got {values[block, clock]:g}; "
            "leave the row out, or measure it again"
        )


def _check_units(clocks: Floats, power_w: Floats, names: Sequence[str]) -> None:
    low, high = _CLOCK_RANGE_MHZ
    if clocks.min() < low or clocks.max() > high:
        wrong = clocks.min() if clocks.min() < low else clocks.max()
        raise ConfigurationError(
            f"clock {wrong:g} MHz is not plausible ({low:g} to {high:g} MHz); is it in another unit?"
        )
    low, high = _POWER_RANGE_W
    bad = np.argwhere((power_w < low) | (power_w > high))
    if len(bad):
        block, clock = bad[0]
        raise ConfigurationError(
            f"block {names[block]!r} at {clocks[clock]:g} MHz would draw {power_w[block, clock]:g} W, "
            f"which is not plausible ({low:g} to {high:g} W); are seconds and milliseconds, or joules "
            "and millijoules, mixed up?"
        )
