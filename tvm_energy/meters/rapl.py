"""Processor energy from Linux powercap (RAPL counters of Intel and AMD).

::

    /sys/class/powercap/
        intel-rapl:0/        name "package-0": counted          (AMD uses the same driver and names)
        intel-rapl:0:0/      name "core": a part of package-0, left out
        intel-rapl:1/        name "package-1": counted
        intel-rapl:2/        name "psys": contains the packages, left out
        intel-rapl-mmio:0/   name "package-0": the same energy a second time, left out

Each holds ``energy_uj``, which counts microjoules up to ``max_energy_range_uj`` and starts again.
Source: Documentation/power/powercap/powercap.rst of the Linux kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tvm_energy.errors import MeasurementError, MeterUnavailable
from tvm_energy.meters.base import DeviceState, MeterInfo, Reading, TimeSource
from tvm_energy.meters.system_time import SystemTime
from tvm_energy.meters.update_period import watch_changes

POWERCAP = Path("/sys/class/powercap")

_ASSUMED_PERIOD_S = 1e-3  # RAPL counters update about every millisecond (Intel SDM, vol. 3B)
_POLL_S = 1e-4
_WATCH_LIMIT_S = 0.5

_REMEDY = (
    "since Linux 5.10 only root may read it (CVE-2020-8694); as root: chmod o+r {path}, or for good "
    'a udev rule: SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chmod -R o+rX /sys%p"; in a '
    "container also mount /sys/class/powercap and /sys/devices/virtual/powercap"
)


@dataclass
class _Domain:
    """One counter, unrolled: it wraps around, the sum does not."""

    folder: Path
    name: str
    range_uj: int
    last_uj: int = field(init=False)
    total_uj: int = 0

    def __post_init__(self) -> None:
        self.last_uj = _read_integer(self.folder / "energy_uj")

    def read_uj(self) -> int:
        """Microjoules since the meter was opened."""
        now_uj = _read_integer(self.folder / "energy_uj")
        step_uj = now_uj - self.last_uj
        self.total_uj += step_uj if step_uj >= 0 else step_uj + self.range_uj
        self.last_uj = now_uj
        return self.total_uj


class RaplMeter:
    """All processor packages of this machine (see `tvm_energy.meters.base.PowerMeter`)."""

    def __init__(self, domains: list[_Domain], info: MeterInfo, time: TimeSource) -> None:
        self.info = info
        self.time = time
        self._domains = domains

    def read(self) -> Reading:
        """See `PowerMeter.read`. It must be called once in every turn of the counters (minutes)."""
        before_s = self.time.now()
        total_uj = sum(domain.read_uj() for domain in self._domains)
        time_s = 0.5 * (before_s + self.time.now())
        return Reading(time_s=time_s, energy_j=total_uj * 1e-6)

    def state(self) -> DeviceState:
        """See `PowerMeter.state`; powercap tells neither clock nor temperature."""
        return DeviceState()

    def close(self) -> None:
        """See `PowerMeter.close`; nothing is held open."""


def open_rapl_meter(*, root: Path = POWERCAP, time: TimeSource | None = None) -> RaplMeter:
    """Open the energy counters of all processor packages.

    Args:
        root: the powercap folder.
        time: the time source; None is real time.

    Raises:
        MeterUnavailable: there are no counters, they may not be read, or they do not move.
    """
    time = SystemTime() if time is None else time
    domains = _package_domains(Path(root))
    changes = watch_changes(
        lambda: float(sum(domain.read_uj() for domain in domains)),
        time,
        poll_s=_POLL_S,
        limit_s=_WATCH_LIMIT_S,
        wanted=20,
    )
    if not changes.times_s:
        raise MeterUnavailable(
            f"the energy counters in {root} do not move (usual in virtual machines); "
            "measure on the bare machine, or use --objective latency"
        )
    # The hardware updates about every millisecond; a sleep takes some 60 us longer than asked for.
    period_s = max(_ASSUMED_PERIOD_S, changes.update_period_s or _ASSUMED_PERIOD_S)
    info = MeterInfo(
        meter="rapl",
        method="counter",
        scope="package",
        device_name=_processor_name(),
        device_uuid=f"cpu:{os.uname().nodename}",
        update_period_s=period_s,
        resolution_j=1e-6,
        max_power_w=_power_limit_w(domains),
        notes=("everything that runs on the processor counts, other programs included",),
    )
    return RaplMeter(domains, info, time)


def _package_domains(root: Path) -> list[_Domain]:
    """Packages, each once: no children, no psys, no second interface to the same counter."""
    found: dict[str, _Domain] = {}
    # "intel-rapl:0" sorts behind "intel-rapl-mmio:0"; the MSR interface is preferred.
    for folder in sorted(root.glob("intel-rapl:*")) + sorted(root.glob("intel-rapl-mmio:*")):
        if folder.name.count(":") != 1:
            continue
        name = _read_text(folder / "name")
        if not name.startswith("package") or name in found:
            continue
        try:
            found[name] = _Domain(folder, name, _read_integer(folder / "max_energy_range_uj"))
        except MeasurementError as exc:
            raise MeterUnavailable(
                f"{exc}; or reload the driver (modprobe intel_rapl_msr)"
            ) from exc
    if not found:
        raise MeterUnavailable(
            f"there is no processor energy counter in {root}; load the driver (modprobe "
            "intel_rapl_msr), use a machine that has RAPL (virtual machines do not), or "
            "use --objective latency"
        )
    return list(found.values())


def _read_integer(path: Path) -> int:
    text = _read_text(path)
    try:
        return int(text)
    except ValueError:
        raise MeasurementError(f"{path} holds {text[:40]!r}, not a number; read it again") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except PermissionError as exc:
        raise MeterUnavailable(f"{path} may not be read: {_REMEDY.format(path=path)}") from exc
    except (OSError, ValueError) as exc:
        raise MeterUnavailable(
            f"{path} cannot be read ({exc}); reload the driver (modprobe intel_rapl_msr)"
        ) from exc


def _power_limit_w(domains: list[_Domain]) -> float | None:
    """The highest limit that firmware enforces, summed over packages; None where one is not told."""
    limits_uw = [_limits_uw(domain.folder) for domain in domains]
    if not all(limits_uw):
        return None
    return sum(max(limits) for limits in limits_uw) * 1e-6


def _limits_uw(folder: Path) -> list[int]:
    limits = []
    for path in folder.glob("constraint_*_power_limit_uw"):
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return [limit for limit in limits if limit > 0]


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "processor"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, "processor")
