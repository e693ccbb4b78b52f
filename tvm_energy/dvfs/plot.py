"""Latency, power and energy over the clock, as a picture (matplotlib, extra ``report``)."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.study import Study
from tvm_energy.errors import ConfigurationError


def plot_study(one: Study, path: Path, title: str) -> None:
    """Draw the measured points, the fit with its 95 % band, and the clock of least energy.

    Args:
        one: what to draw.
        path: a file; its ending chooses the format (png, svg, pdf).
        title: says what was measured, and that it was simulated where it was.

    Raises:
        ConfigurationError: matplotlib is missing, or cannot write this kind of file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigurationError('plots need matplotlib: pip install "tvm-energy[report]"') from exc
    clocks = one.series.clock_mhz
    f = np.linspace(clocks[0], clocks[-1], 400)
    figure = Figure(figsize=(7, 9 if one.power else 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3 if one.power else 1, 1, sharex=True, squeeze=False)[:, 0]
    t, t_width = one.latency.predict(f), one.latency.half_width(f)
    _panel(axes[0], f, t * 1e3, t_width * 1e3, "latency [ms]")
    axes[0].plot(clocks, one.series.latency_s * 1e3, "o", color="black", ms=4)
    figure.suptitle(textwrap.fill(title, 90), fontsize=10)
    axes[0].set_title(f"latency: {one.latency.form}", fontsize=10)
    if one.power is not None and one.series.power_w is not None and one.energy is not None:
        p, p_width = one.power.predict(f), one.power.half_width(f)
        _panel(axes[1], f, p, p_width, "power [W]")
        axes[1].plot(clocks, one.series.power_w, "o", color="black", ms=4)
        axes[1].set_title(f"power: {one.power.form}", fontsize=10)
        width = t * p * np.hypot(t_width / t, p_width / p)
        _panel(axes[2], f, t * p, width, "energy [J]")
        axes[2].plot(clocks, one.series.power_w * one.series.latency_s, "o", color="black", ms=4)
        best = one.energy.clock_mhz[one.energy.chosen]
        for axis in axes:
            axis.axvline(best, color="tab:red", lw=1, ls="--")
        axes[2].set_title(f"least energy at {best:g} MHz", fontsize=10, color="tab:red")
    axes[-1].set_xlabel("requested core clock [MHz]")
    try:
        figure.savefig(path)
    except ValueError as exc:
        raise ConfigurationError(f"{path}: {exc}") from exc


def _panel(axis: Any, f: Array, centre: Array, width: Array, label: str) -> None:
    axis.plot(f, centre, color="tab:blue")
    axis.fill_between(f, np.maximum(centre - width, 0), centre + width, alpha=0.2, lw=0)
    # A band that the data leaves wide open must not hide the curve.
    axis.set_ylim(0, 1.6 * float(centre.max()))
    axis.set_ylabel(label)
