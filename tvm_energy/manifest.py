"""The manifest of an exported folder, read without TVM: which clock the chosen kernels were chosen at.

::

    with deployed_clock("deploy"):     # locks what the manifest says, or nothing
        run()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tvm_energy.clocks import LockedClocks, locked_clocks
from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.json_lines import parse_line
from tvm_energy.meters.nvml_clocks import ClockControl

MANIFEST_FILE = "manifest.json"
FORMAT, FORMAT_VERSION = "tvm-energy-export", 1

#: The largest manifest that is read: a thousand kernels take about 2 MB.
_LARGEST_MANIFEST_BYTES = 64 << 20

#: Clocks outside of this range are no clocks of a GPU.
_CLOCK_RANGE_MHZ = (1.0, 20_000.0)


def read_manifest(folder: Path | str) -> dict[str, Any] | None:
    """The manifest of an exported folder; None when the folder has none.

    Raises:
        RecordFormatError: it is not one of ours, or a newer version wrote it.
    """
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _LARGEST_MANIFEST_BYTES:
            raise RecordFormatError("it is too large")
        manifest = parse_line(
            path.read_text(encoding="utf-8", errors="replace"), _LARGEST_MANIFEST_BYTES
        )
    except OSError as exc:
        raise WorkDirError(f"cannot read {path}: {exc.strerror}") from exc
    except RecordFormatError as exc:
        raise RecordFormatError(f"{path}: {exc}") from exc
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RecordFormatError(f"{path} was not written by `tvm-energy export`")
    if manifest.get("version") != FORMAT_VERSION:
        raise RecordFormatError(
            f"{path}: version {str(manifest.get('version'))[:40]} is not supported (this tvm-energy "
            f"reads {FORMAT_VERSION}); export again, or use a newer tvm-energy"
        )
    return manifest


def clock_of(manifest: Mapping[str, Any], kernel: str | None = None) -> int | None:
    """The core clock, MHz, that a manifest wants locked; None where it is left to the driver.

    Args:
        manifest: of an export.
        kernel: name or workload hash of a task; needed where each kernel has a clock of its own.

    Raises:
        ConfigurationError: no such kernel, or kernels differ in their clock and none is named.
        RecordFormatError: a clock in the manifest is not a number of MHz.
    """
    kernels = [item for item in _list(manifest.get("kernels")) if isinstance(item, dict)]
    if kernel is not None:
        kernels = [item for item in kernels if kernel in (item.get("task"), item.get("workload"))]
        if not kernels:
            raise ConfigurationError(f"the export has no kernel called {kernel!r}")
    clocks = {_mhz(item.get("clock_mhz")) for item in kernels}
    if len(clocks) > 1:
        names = ", ".join(
            f"{item.get('task')} ({item.get('clock_mhz') or 'default'})" for item in kernels
        )
        raise ConfigurationError(
            f"the kernels of the export have different clocks, so name the one that runs: {names}"
        )
    return clocks.pop() if clocks else None


@contextlib.contextmanager
def deployed_clock(
    folder: Path | str,
    kernel: str | None = None,
    *,
    device: str | int | None = None,
    required: bool = False,
    control: ClockControl | None = None,
) -> Iterator[LockedClocks | None]:
    """Lock the core clock for which an exported folder was chosen, inside the block.

    Args:
        folder: written by ``tvm-energy export``.
        kernel: see `clock_of`.
        device, required, control: see `tvm_energy.clocks.locked_clocks`.

    Yields:
        What the lock can be read back from; None where the manifest leaves the clock to the driver.

    Raises:
        ConfigurationError: the folder has no manifest; see also `clock_of`.
        RecordFormatError, ClockUnavailable, MeterUnavailable: see `read_manifest` and `locked_clocks`.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigurationError(
            f"{folder} has no {MANIFEST_FILE}; give the folder that `tvm-energy export` wrote"
        )
    clock_mhz = clock_of(manifest, kernel)
    if clock_mhz is None:
        yield None
        return
    with locked_clocks(clock_mhz, device=device, required=required, control=control) as clocks:
        yield clocks


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mhz(value: Any) -> int | None:
    if value is None:
        return None
    low, high = _CLOCK_RANGE_MHZ
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RecordFormatError(f"{str(value)[:40]!r} in the manifest is no clock in MHz")
    return round(value)
