"""Locked clocks of one NVIDIA GPU, set through NVML or, without permission, through ``zeusd``.

This is the only code that changes anything on a GPU, and only `tvm_energy.clocks` calls it, which
always releases what it locked. Application clocks are not used: NVML 13 deprecates them, and newer
GPUs lack them. The list of supported clocks is queried by `ClockControl.supported_mhz` alone, because on some cards
the query hangs the machine (NVIDIA/open-gpu-kernel-modules#1239).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from tvm_energy.errors import ClockUnavailable, ConfigurationError, MeterUnavailable
from tvm_energy.meters.base import DeviceState
from tvm_energy.meters.nvml import nvml_session, throttle_names
from tvm_energy.meters.nvml_devices import choose, describe_all, optional
from tvm_energy.meters.nvml_errors import (
    FUNCTION_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    code_of,
    errors_of,
    explain,
    opening,
)
from tvm_energy.meters.zeusd import Zeusd, ZeusdError, find_zeusd

logger = logging.getLogger(__name__)

_CLOCK_SM = 1  # NVML_CLOCK_SM
_CLOCK_MEMORY = 2  # NVML_CLOCK_MEM
_INVALID_ARGUMENT = 2


class ClockControl(Protocol):
    """Sets and reads the clocks of one GPU.

    Attributes:
        device_name, device_uuid: which GPU.
        how: ``nvml``, ``zeusd`` or ``simulated``: what sets the clocks; known after the first `lock`.
        simulated: True for a simulated device.
    """

    device_name: str
    device_uuid: str
    how: str
    simulated: bool

    def lock(self, clock_mhz: int) -> None:
        """Hold the core clock at that value, as far as power and heat allow.

        Raises:
            ClockUnavailable: no permission, or not supported.
            ConfigurationError: the GPU refuses the value.
        """
        ...

    def reset(self) -> None:
        """Release the core clock.

        Raises:
            ClockUnavailable: no permission, not supported, or the GPU is gone.
        """
        ...

    def lock_memory(self, clock_mhz: int) -> None:
        """As `lock`, for the memory clock."""
        ...

    def reset_memory(self) -> None:
        """As `reset`, for the memory clock."""
        ...

    def state(self) -> DeviceState:
        """Core clock, temperature and throttle reasons now."""
        ...

    def memory_mhz(self) -> float | None:
        """Memory clock now; None where it cannot be read."""
        ...

    def max_mhz(self) -> float | None:
        """Highest core clock; None where it cannot be read."""
        ...

    def supported_mhz(self) -> dict[int, list[int]]:
        """Memory clock -> core clocks that can be locked with it, highest first.

        Some cards hang in this query; call it only when the user asked for the list.

        Raises:
            ClockUnavailable: the GPU does not tell.
        """
        ...

    def close(self) -> None:
        """Release the library; the clocks stay as they are."""
        ...


class NvmlClocks:
    """See `ClockControl`; made by `open_clock_control`."""

    def __init__(
        self, nvml: Any, handle: Any, index: int, name: str, uuid: str, daemon: Zeusd | None
    ) -> None:
        self.device_name = name
        self.device_uuid = uuid
        self.simulated = bool(getattr(nvml, "simulated", False))
        self.how = "simulated" if self.simulated else "nvml"
        self._nvml = nvml
        self._handle = handle
        self._index = index
        self._daemon = daemon
        self._resources = contextlib.ExitStack()

    def lock(self, clock_mhz: int) -> None:
        """See `ClockControl.lock`."""
        self._set(
            f"locking the core clock at {clock_mhz} MHz",
            lambda: self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, clock_mhz, clock_mhz),
            lambda daemon, gpu: daemon.lock(gpu, clock_mhz),
        )

    def reset(self) -> None:
        """See `ClockControl.reset`."""
        self._set(
            "releasing the core clock",
            lambda: self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle),
            lambda daemon, gpu: daemon.reset(gpu),
        )

    def lock_memory(self, clock_mhz: int) -> None:
        """See `ClockControl.lock_memory`."""
        self._set(
            f"locking the memory clock at {clock_mhz} MHz",
            lambda: self._nvml.nvmlDeviceSetMemoryLockedClocks(self._handle, clock_mhz, clock_mhz),
            lambda daemon, gpu: daemon.lock_memory(gpu, clock_mhz),
        )

    def reset_memory(self) -> None:
        """See `ClockControl.reset_memory`."""
        self._set(
            "releasing the memory clock",
            lambda: self._nvml.nvmlDeviceResetMemoryLockedClocks(self._handle),
            lambda daemon, gpu: daemon.reset_memory(gpu),
        )

    def state(self) -> DeviceState:
        """See `ClockControl.state`."""
        nvml, handle = self._nvml, self._handle
        bits = optional(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if bits is None:
            bits = optional(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return DeviceState(
            clock_mhz=self._clock(lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM)),
            temperature_c=self._clock(lambda: nvml.nvmlDeviceGetTemperature(handle, 0)),
            throttle_reasons=throttle_names(int(bits or 0)),
        )

    def memory_mhz(self) -> float | None:
        """See `ClockControl.memory_mhz`."""
        return self._clock(lambda: self._nvml.nvmlDeviceGetClockInfo(self._handle, _CLOCK_MEMORY))

    def max_mhz(self) -> float | None:
        """See `ClockControl.max_mhz`."""
        return self._clock(lambda: self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, _CLOCK_SM))

    def supported_mhz(self) -> dict[int, list[int]]:
        """See `ClockControl.supported_mhz`."""
        nvml, handle = self._nvml, self._handle
        try:
            return {
                int(memory): [
                    int(core) for core in nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory)
                ]
                for memory in nvml.nvmlDeviceGetSupportedMemoryClocks(handle)
            }
        except errors_of(nvml, AttributeError) as exc:
            code = code_of(exc)
            raise ClockUnavailable(
                f"{self.device_name} does not tell its clocks (NVML error {code}): {explain(code)}"
            ) from exc

    def close(self) -> None:
        """See `ClockControl.close`; a second call does nothing."""
        self._resources.close()

    def keep(self, resources: contextlib.ExitStack) -> None:
        """Close those, too, in `close`."""
        self._resources = resources

    def _clock(self, call: Callable[[], int]) -> float | None:
        value = optional(self._nvml, call)
        return None if value is None else float(value)

    def _set(
        self, what: str, directly: Callable[[], None], through: Callable[[Zeusd, int], None]
    ) -> None:
        """Change a clock: through NVML, and through the daemon where NVML gives no permission."""
        try:
            directly()
        except errors_of(self._nvml, AttributeError) as exc:
            code = code_of(exc)
            if code == NO_PERMISSION and self._daemon is not None:
                self._through_daemon(what, self._daemon, through)
                return
            if code == _INVALID_ARGUMENT:
                raise ConfigurationError(
                    f"{what} failed: {self.device_name} does not support this clock; "
                    "tvm-energy clocks show --supported lists those it does"
                ) from exc
            raise ClockUnavailable(f"{what} failed: {_reason(code)}") from exc
        if not self.simulated:
            self.how = "nvml"

    def _through_daemon(
        self, what: str, daemon: Zeusd, through: Callable[[Zeusd, int], None]
    ) -> None:
        try:
            through(daemon, daemon.gpu_id(self._index, self._pci_address()))
        except ZeusdError as exc:
            if exc.status == 400:  # zeusd's answer to NVML_ERROR_INVALID_ARGUMENT
                raise ConfigurationError(f"{what} through zeusd failed: {exc}") from exc
            raise ClockUnavailable(f"{what} through zeusd failed: {exc}") from exc
        self.how = "zeusd"

    def _pci_address(self) -> str | None:
        info = optional(self._nvml, lambda: self._nvml.nvmlDeviceGetPciInfo(self._handle))
        bus = getattr(info, "busId", None)
        return bus.decode() if isinstance(bus, bytes) else bus


def open_clock_control(
    uuid_or_index: str | int | None = None, *, nvml: Any = None, daemon: Zeusd | None = None
) -> NvmlClocks:
    """Open the clocks of a GPU; nothing is changed yet.

    Args:
        uuid_or_index: as in `tvm_energy.meters.nvml.open_nvml_meter`.
        nvml: a module like ``pynvml``, real or simulated; None imports the real one.
        daemon: the ``zeusd`` to ask where NVML gives no permission; None looks for its socket.

    Raises:
        MeterUnavailable: no GPU, no driver, or no such GPU.
    """
    if daemon is None and nvml is None:
        daemon = find_zeusd()
    with contextlib.ExitStack() as resources:
        nvml = resources.enter_context(nvml_session(nvml))
        with opening(nvml, "opening the GPU"):
            gpu, _ = choose(describe_all(nvml), uuid_or_index)
            if not gpu.uuid:
                raise MeterUnavailable(f"{gpu.name} does not answer: {gpu.problem}")
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        control = NvmlClocks(nvml, handle, gpu.index, gpu.name, gpu.uuid, daemon)
        control.keep(resources.pop_all())
        return control


def _reason(code: int) -> str:
    if code == NO_PERMISSION:
        return (
            "no permission; it needs root (in a container the capability SYS_ADMIN), or the daemon "
            "zeusd, which an administrator starts once (cargo install zeusd)"
        )
    if code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
        return "this GPU or its driver cannot lock clocks (Volta or newer can, vGPUs cannot)"
    return f"NVML error {code}: {explain(code)}"
