"""What one NVIDIA GPU can tell and do, each thing asked for by itself.

An NVML that starts proves little: on a Jetson every power query fails, in WSL some do, and virtual GPUs lack the
counter (HazyResearch/intelligence-per-watt#40, dask/distributed#5342). Nothing is changed on the GPU, and the
list of supported clocks is not queried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tvm_energy.meters.base import TimeSource
from tvm_energy.meters.nvml import throttle_names
from tvm_energy.meters.nvml_devices import other_processes, power_limit_w
from tvm_energy.meters.nvml_errors import code_of, errors_of, explain
from tvm_energy.meters.nvml_sensors import field_number, usage_is_instant
from tvm_energy.meters.window import IMPLAUSIBLE
from tvm_energy.meters.zeusd import Zeusd, ZeusdError

_FIELDS = {186: "instant power", 185: "average power"}
_SCOPES = {0: "gpu", 1: "module", 2: "memory"}
_CLOCKS = {1: "core", 2: "memory"}  # NVML_CLOCK_SM, NVML_CLOCK_MEM
#: No sensor is known that updates more slowly than every 100 ms.
_WATCH_S = 0.5
_CAP_SYS_ADMIN = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing that was asked for.

    Attributes:
        name: ``counter``, ``instant power``, ``average power``, ``power usage``, ``power limit``, ``clocks``,
            ``clock control``, ``temperature``, ``throttling``, ``persistence``, ``mig``, ``processes``.
        severity: ``ok``; ``info``: missing, and something else serves; ``warning``: disturbs measuring.
        text: one sentence.
        remedy: what to do; empty where nothing need be done.
    """

    name: str
    severity: str
    text: str
    remedy: str = ""


def probe_gpu(
    nvml: Any, handle: Any, device_name: str, time: TimeSource, daemon: Zeusd | None
) -> Iterator[Capability]:
    """Ask a GPU for everything that measuring can use, one thing after the other.

    Args:
        nvml: a started module like ``pynvml``.
        handle: the GPU.
        device_name: its product name.
        time: passes the time in which the counter must move.
        daemon: the ``zeusd`` whose socket is present, if any.
    """
    ask = _Asker(nvml)
    yield _counter(ask, handle, time)
    for field in _FIELDS:
        yield _field(ask, handle, field)
    yield _usage(ask, handle, device_name)
    yield _limit(nvml, handle)
    yield _clocks(ask, handle)
    yield clock_control(daemon, os.geteuid() == 0, _effective_capabilities())
    yield _temperature(ask, handle)
    yield from _throttling(ask, handle)
    yield from _persistence(ask, handle)
    yield _mig(ask, handle)
    yield _processes(nvml, handle)


class _Asker:
    """Calls NVML and turns an error into its sentence."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def __call__(self, call: Callable[[], Any]) -> tuple[Any, str]:
        """(value, "") or (None, reason)."""
        try:
            return call(), ""
        except errors_of(self.nvml, AttributeError) as exc:
            code = code_of(exc)
            return None, f"NVML error {code}: {explain(code).partition(';')[0]}"


def _counter(ask: _Asker, handle: Any, time: TimeSource) -> Capability:
    def read() -> int:
        return int(ask.nvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    first_mj, reason = ask(read)
    if reason:
        return Capability(
            name="counter",
            severity="info",
            text=f"no cumulative energy counter ({reason})",
            remedy="power readings are integrated instead; nothing need be done",
        )
    started_s = time.now()
    while time.now() - started_s < _WATCH_S:
        time.sleep(0.02)
        now_mj, reason = ask(read)
        if reason or now_mj != first_mj:
            break
    else:
        return Capability(
            name="counter",
            severity="warning",
            text=f"the energy counter answers ({first_mj * 1e-3:.1f} J) but stands still",
            remedy="power readings are integrated instead; update or reload the driver",
        )
    return Capability(name="counter", severity="ok", text="the energy counter answers and moves")


def _field(ask: _Asker, handle: Any, field: int) -> Capability:
    answers, reasons = [], []
    for scope, scope_name in _SCOPES.items():

        def read(scope: int = scope) -> float:
            value = ask.nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
            return field_number(ask.nvml, value) * 1e-3

        watts, reason = ask(read)
        if reason:
            reasons.append(reason)
        else:
            answers.append(f"{scope_name} {watts:.1f} W")
    title = f"{_FIELDS[field]} (field {field})"
    if answers:
        missing = len(_SCOPES) - len(answers)
        text = f"{title}: {', '.join(answers)}" + (
            f"; the other {missing} scopes are not supported" if missing else ""
        )
        return Capability(name=_FIELDS[field], severity="ok", text=text)
    return Capability(
        name=_FIELDS[field],
        severity="info",
        text=f"no {title} in any scope ({reasons[0]})",
        remedy="needs driver 530 or newer; other sensors serve until then",
    )


def _usage(ask: _Asker, handle: Any, device_name: str) -> Capability:
    milliwatts, reason = ask(lambda: ask.nvml.nvmlDeviceGetPowerUsage(handle))
    if reason:
        return Capability(
            name="power usage",
            severity="info",
            text=f"no power usage ({reason})",
            remedy="other sensors serve; nothing need be done where one of them answers",
        )
    limit_w = power_limit_w(ask.nvml, handle)
    watts = milliwatts * 1e-3
    if limit_w is not None and watts > IMPLAUSIBLE * limit_w:
        return Capability(
            name="power usage",
            severity="warning",
            text=f"{watts:.0f} W is not plausible with a limit of {limit_w:.0f} W",
            remedy="update or reload the driver, then run doctor --self-test",
        )
    instant = usage_is_instant(ask.nvml, handle, device_name)
    kind = "instantaneous" if instant else "the mean of the last second"
    return Capability(name="power usage", severity="ok", text=f"{watts:.1f} W, {kind}")


def _limit(nvml: Any, handle: Any) -> Capability:
    limit_w = power_limit_w(nvml, handle)
    if limit_w is None:
        return Capability(
            name="power limit",
            severity="info",
            text="the power limit is not told, so implausible readings are harder to see",
            remedy="update the driver",
        )
    return Capability(name="power limit", severity="ok", text=f"{limit_w:.0f} W")


def _clocks(ask: _Asker, handle: Any) -> Capability:
    found, reasons = [], []
    for kind, title in _CLOCKS.items():
        mhz, reason = ask(partial(ask.nvml.nvmlDeviceGetClockInfo, handle, kind))
        if reason:
            reasons.append(f"{title}: {reason}")
        else:
            found.append(f"{title} {mhz} MHz")
    if reasons:
        return Capability(
            name="clocks",
            severity="info",
            text=f"not every clock can be read ({'; '.join(reasons)})",
            remedy="measurements then lack the clock; update the driver",
        )
    return Capability(name="clocks", severity="ok", text=", ".join(found))


def clock_control(daemon: Zeusd | None, is_root: bool, capabilities: int) -> Capability:
    """Whether clocks may be locked, found without touching one.

    Args:
        daemon: the ``zeusd`` whose socket is present, if any.
        is_root: this process runs as root.
        capabilities: its effective Linux capabilities, as a bit mask.
    """
    name = "clock control"
    if is_root and capabilities & _CAP_SYS_ADMIN:
        return Capability(name=name, severity="ok", text="clocks may be locked (root)")
    reason = "only root with the capability SYS_ADMIN may lock clocks"
    if daemon is not None:
        try:
            if daemon.controls_clocks():
                text = f"clocks may be locked through zeusd at {daemon.path}"
                return Capability(name=name, severity="ok", text=text)
            reason = f"zeusd at {daemon.path} was started without gpu-control"
        except ZeusdError as exc:
            reason = str(exc).partition(";")[0]
    return Capability(
        name=name,
        severity="info",
        text=f"clocks cannot be locked, only read: {reason}",
        remedy="run as root (in a container with --cap-add SYS_ADMIN), or let an administrator start zeusd",
    )


def _effective_capabilities() -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    except (OSError, ValueError):
        pass
    return 0


def _temperature(ask: _Asker, handle: Any) -> Capability:
    celsius, reason = ask(lambda: ask.nvml.nvmlDeviceGetTemperature(handle, 0))
    if reason:
        return Capability(
            name="temperature",
            severity="info",
            text=f"the temperature cannot be read ({reason})",
            remedy="measurements then lack it; update the driver",
        )
    return Capability(name="temperature", severity="ok", text=f"{celsius} °C")


def _throttling(ask: _Asker, handle: Any) -> Iterator[Capability]:
    nvml = ask.nvml
    bits, reason = ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reason:
        bits, reason = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    if reason:
        yield Capability(
            name="throttling",
            severity="info",
            text=f"what limits the clock cannot be read ({reason})",
            remedy="measurements then lack it; update the driver",
        )
        return
    names = [name for name in throttle_names(int(bits)) if name != "gpu_idle"]
    hot = [name for name in names if "thermal" in name or "hw_" in name]
    if hot:
        yield Capability(
            name="throttling",
            severity="warning",
            text=f"the clock is limited now by {', '.join(hot)}",
            remedy="let the GPU cool, and check fans and power cables",
        )
    else:
        limits = (
            f"the clock is limited by {', '.join(names)}" if names else "nothing limits the clock"
        )
        yield Capability(name="throttling", severity="ok", text=limits)


def _persistence(ask: _Asker, handle: Any) -> Iterator[Capability]:
    mode, reason = ask(lambda: ask.nvml.nvmlDeviceGetPersistenceMode(handle))
    if reason:
        return
    if mode:
        yield Capability(name="persistence", severity="ok", text="persistence mode is on")
    else:
        yield Capability(
            name="persistence",
            severity="info",
            text="persistence mode is off: the driver may unload between runs and reset the counter",
            remedy="as administrator: nvidia-smi -pm 1, or start nvidia-persistenced",
        )


def _mig(ask: _Asker, handle: Any) -> Capability:
    mode, reason = ask(lambda: ask.nvml.nvmlDeviceGetMigMode(handle))
    if reason or not mode[0]:
        text = "cannot be divided (no MIG)" if reason else "is not divided (MIG is off)"
        return Capability(name="mig", severity="ok", text=text)
    return Capability(
        name="mig",
        severity="warning",
        text="MIG is on: power and energy are those of the whole GPU, shared by all instances",
        remedy="nvidia-smi -mig 0 as administrator, another GPU, or --force",
    )


def _processes(nvml: Any, handle: Any) -> Capability:
    pids = other_processes(nvml, handle)
    if not pids:
        return Capability(name="processes", severity="ok", text="no other process computes on it")
    listed = ", ".join(f"{pid} {_command(pid)}".strip() for pid in pids)
    return Capability(
        name="processes",
        severity="warning",
        text=f"other processes compute on it (pid {listed}); their energy counts into every reading",
        remedy="end them, or choose another GPU with --device",
    )


def _command(pid: int) -> str:
    """Name of a process; empty where it is hidden (another container)."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return "".join(character for character in name if character.isprintable())
