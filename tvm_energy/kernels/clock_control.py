"""Who locks the clock of a tuning device, and which clocks there are."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tvm_energy.clocks import locked_clocks
from tvm_energy.dvfs.forms import Array
from tvm_energy.dvfs.sweep import ClockControl
from tvm_energy.errors import ConfigurationError
from tvm_energy.meters.nvml_clocks import open_clock_control


def open_clocks(device: Any, *, try_out: bool = False) -> tuple[ClockControl, Array]:
    """The control and the clocks of an open device, ascending, MHz.

    Args:
        device: a tuning device of one of the tuners.
        try_out: lock the highest clock and release it again, to find out now whether that is allowed.

    Raises:
        ConfigurationError: the device has no clock that could be locked.
        ClockUnavailable: no permission, no support, or another process holds the clocks.
    """
    control: ClockControl
    if device.spec.startswith("sim:"):
        control, clocks = device.gpu, np.array(device.gpu.spec.clocks_mhz, dtype=float)
    elif device.spec.startswith("cuda:"):
        control = NvmlClocks(device.spec.removeprefix("cuda:"))
        clocks = control.supported()
    else:
        raise ConfigurationError(
            f"the clock of {device.spec} cannot be locked: that is possible on NVIDIA GPUs and on simulated "
            "devices such as sim:a100 only"
        )
    if try_out:
        with control.locked(float(clocks[-1])):
            pass
    return control, clocks


class NvmlClocks:
    """`ClockControl` of an NVIDIA GPU through `tvm_energy.clocks`.

    Args:
        uuid: of the GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def locked(self, clock_mhz: float) -> contextlib.AbstractContextManager[object]:
        """See `ClockControl`; raises where there is no permission."""
        return locked_clocks(round(clock_mhz), device=self._uuid, required=True)

    def supported(self) -> Array:
        """Core clocks at the highest memory clock, ascending."""
        with contextlib.closing(open_clock_control(self._uuid)) as control:
            table = control.supported_mhz()
        return np.array(sorted(table[max(table)]), dtype=float)
