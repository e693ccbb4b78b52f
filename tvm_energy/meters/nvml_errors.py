"""NVML's error codes as sentences with a next step.

The codes are those of ``nvml.h`` (``nvmlReturn_t``), which does not change them. Numbers instead of
``pynvml``'s names, so that a simulated module and an old binding work alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tvm_energy.errors import MeasurementError, MeterUnavailable, TvmEnergyError

NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13

_UNINITIALIZED = 1
NO_PERMISSION = 4
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_OPERATING_SYSTEM = 17
_VERSION_MISMATCH = 18
_NOT_READY = 27
_GPU_NOT_FOUND = 28

#: Code -> what it means, and what to do.
_SENTENCES = {
    _UNINITIALIZED: "NVML was shut down; open the meter again",
    2: "NVML refused an argument; update the driver or nvidia-ml-py",
    NOT_SUPPORTED: "this GPU does not support the query; try another sensor or a newer driver",
    NO_PERMISSION: (
        "no permission; in a container pass the GPU with --gpus and the capability 'utility', "
        "elsewhere ask the administrator for access to /dev/nvidiactl"
    ),
    _NOT_FOUND: "there is no such GPU; nvidia-smi -L lists those that exist",
    8: "the GPU's external power cables are not connected properly; check them",
    _DRIVER_NOT_LOADED: (
        "the NVIDIA driver is not loaded; run nvidia-smi, and (re)install or load the driver if that "
        "fails too"
    ),
    10: "NVML timed out; the driver is busy or hanging, try again",
    11: "the kernel reports an interrupt problem with the GPU; see dmesg",
    _LIBRARY_NOT_FOUND: (
        "the library libnvidia-ml.so.1 was not found; install the NVIDIA driver, and in a container "
        "pass the GPU with --gpus (NVIDIA container toolkit)"
    ),
    FUNCTION_NOT_FOUND: "the installed driver is too old for this query; update it",
    14: "the GPU's information ROM is corrupted; contact the vendor",
    _GPU_IS_LOST: "the GPU fell off the bus or is otherwise inaccessible; see dmesg, then reboot",
    _RESET_REQUIRED: "the GPU needs a reset before it can be used again; reboot the machine",
    _OPERATING_SYSTEM: "the operating system blocked the request; check cgroups and device files",
    _VERSION_MISMATCH: (
        "the driver's kernel module and its libraries have different versions (usual after an update); "
        "reboot the machine"
    ),
    19: "the GPU is in use by another process in a way that excludes this query; try again later",
    20: "NVML ran out of memory; close other programs",
    21: "the sensor has no data now; try again",
    23: "NVML lacks a resource; close other monitoring programs",
    25: "driver and nvidia-ml-py disagree on a version; update nvidia-ml-py",
    _NOT_READY: (
        "the system is not in ready state; on HGX machines start the fabric manager "
        "(systemctl start nvidia-fabricmanager) and wait for nvidia-smi to work"
    ),
    _GPU_NOT_FOUND: "no GPU was found; check that nvidia-smi -L lists one",
    999: "NVML reports an unknown error; see dmesg, and reload the driver if it stays",
}

#: Trying the same again cannot help: the meter is gone for this process.
_PERMANENT = {
    _UNINITIALIZED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    _NOT_FOUND,
    _DRIVER_NOT_LOADED,
    _LIBRARY_NOT_FOUND,
    FUNCTION_NOT_FOUND,
    _GPU_IS_LOST,
    _RESET_REQUIRED,
    _OPERATING_SYSTEM,
    _VERSION_MISMATCH,
    _NOT_READY,
    _GPU_NOT_FOUND,
}


def explain(code: int) -> str:
    """What an error code means and what to do."""
    return _SENTENCES.get(code, "an error that this version does not know; update the driver")


def errors_of(nvml: Any, *others: type[BaseException]) -> tuple[type[BaseException], ...]:
    """What the binding raises, and others to be caught with it.

    nvidia-ml-py's ``NVMLLibraryMismatchError`` (the library lacks a versioned function) is not an
    ``NVMLError``.
    """
    return (*others, nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))


@contextlib.contextmanager
def opening(nvml: Any, what: str) -> Iterator[None]:
    """Turn NVML's errors into `MeterUnavailable` while a meter is opened.

    Args:
        nvml: the module; its ``NVMLError`` carries ``value``.
        what: what was tried, as the beginning of a sentence.
    """
    try:
        yield
    except errors_of(nvml) as exc:
        code = code_of(exc)
        raise MeterUnavailable(f"{what} failed (NVML error {code}): {explain(code)}") from exc


@contextlib.contextmanager
def reading(nvml: Any, what: str) -> Iterator[None]:
    """Turn NVML's errors into `MeasurementError` or, where they are final, `MeterUnavailable`."""
    try:
        yield
    except errors_of(nvml) as exc:
        code = code_of(exc)
        kind: type[TvmEnergyError] = MeterUnavailable if code in _PERMANENT else MeasurementError
        raise kind(f"{what} failed (NVML error {code}): {explain(code)}") from exc


def code_of(error: BaseException) -> int:
    """The NVML code of an exception; FUNCTION_NOT_FOUND where it carries none."""
    return int(getattr(error, "value", FUNCTION_NOT_FOUND))
