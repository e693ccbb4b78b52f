"""Lock the clock of a GPU for a while, read back what came of it, and always let go of it again.

::

    with locked_clocks(1200) as clocks:            time ─►
        clocks.read_back(load)   requested  ....────────────────────────....
        measure(load, meter, ..) observed   ~~~~╲____________╱╲_________~~~~
                                                 └ settles    └ power cap: below what was asked for

What is locked is released at the end of the block, after an exception, at SIGINT, SIGTERM and SIGHUP, and at the end
of the interpreter. A process that is killed outright (SIGKILL) cannot release anything: before a clock is
locked, a state file says so, and ``tvm-energy clocks restore`` undoes it. Only *locked clocks* are
used, never application clocks, and the memory clock only when asked for by name (on some cards any lock of it lowers
the core clock: NVIDIA/open-gpu-kernel-modules#1265). NVML does not tell whether a clock is locked, so a lock that
somebody else set before is not known here and is gone afterwards.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from tvm_energy.errors import ClockUnavailable, MeterUnavailable
from tvm_energy.meters.base import Load, TimeSource
from tvm_energy.meters.lock import device_lock, lock_owner, open_shared, shared_directory
from tvm_energy.meters.nvml_clocks import ClockControl, open_clock_control
from tvm_energy.meters.system_time import SystemTime

__all__ = [
    "ClockReading",
    "LeftLocked",
    "LockedClocks",
    "left_locked",
    "locked_clocks",
    "restore_clocks",
]

logger = logging.getLogger(__name__)

#: A lock is held to within this: clocks come in steps of 15 MHz, and NVML rounds.
_TOLERANCE_MHZ = 15.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREFIX, _SUFFIX = "tvm_energy-clocks-", ".json"
_LONGEST_STATE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """What the clock did under load.

    Attributes:
        requested_mhz: what was asked for; None where nothing is locked.
        observed_mhz: median of the readings under load; None where the clock cannot be read.
        lowest_mhz, highest_mhz: of the same readings.
        held: the median is within 15 MHz of what was asked for.
        throttle_reasons: what limited the clock meanwhile.
    """

    requested_mhz: int | None
    observed_mhz: float | None
    lowest_mhz: float | None
    highest_mhz: float | None
    held: bool
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftLocked:
    """A clock that some process of ours locked and has not released yet.

    Attributes:
        device_uuid, device_name: the GPU.
        pid: of the process that locked it.
        clock_mhz, memory_mhz: what was locked.
        since: Unix time in seconds.
        alive: that process still runs and will release it itself.
    """

    device_uuid: str
    device_name: str
    pid: int
    clock_mhz: int | None
    memory_mhz: int | None
    since: float
    alive: bool


class LockedClocks:
    """The clocks of one GPU inside a `locked_clocks` block.

    Attributes:
        active: False where clocks may not be set and the block only measures.
        reason: why not; empty where they are.
        requested_mhz: core clock asked for last; None where nothing is locked.
        requested_memory_mhz: memory clock asked for; None (the default) leaves it alone.
    """

    def __init__(self, control: ClockControl) -> None:
        self.active = False
        self.reason = ""
        self.requested_mhz: int | None = None
        self.requested_memory_mhz: int | None = None
        self._control = control

    @property
    def how(self) -> str:
        """``nvml``, ``zeusd``, ``simulated``, or ``none`` where nothing is locked."""
        return self._control.how if self.active else "none"

    def change(self, clock_mhz: int) -> None:
        """Lock another core clock; a sweep over clocks needs one block only.

        Raises:
            ClockUnavailable, ConfigurationError: see `locked_clocks`.
        """
        _check_mhz(clock_mhz)
        if not self.active:
            return
        _write_state(self._control, clock_mhz, self.requested_memory_mhz)
        self._control.lock(clock_mhz)
        self.requested_mhz = clock_mhz

    def observed_mhz(self) -> float | None:
        """Core clock at this moment; call it while a kernel runs, since an idle GPU clocks down."""
        return self._control.state().clock_mhz

    def read_back(
        self, load: Load, *, seconds: float = 0.5, time: TimeSource | None = None
    ) -> ClockReading:
        """Run a kernel for that long and read the clock meanwhile.

        Args:
            load: keeps the GPU busy.
            seconds: how long; the first third is left out, for the clock to settle.
            time: the time of the load; None is real time.

        Raises:
            ValueError: ``seconds`` is not positive.
        """
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds}")
        clock = SystemTime() if time is None else time
        launches, started_s = 1, clock.now()
        clocks: list[float] = []
        reasons: set[str] = set()
        while (now_s := clock.now() - started_s) < seconds or not now_s:
            load.enqueue(launches)
            if now_s >= seconds / 3:
                state = self._control.state()
                if state.clock_mhz is not None:
                    clocks.append(state.clock_mhz)
                reasons.update(state.throttle_reasons)
            load.synchronize()
            took_s = clock.now() - started_s - now_s
            if took_s < 0.02:
                launches = min(2 * launches, 1 << 20)
        return self._reading(clocks, reasons)

    def _reading(self, clocks: list[float], reasons: set[str]) -> ClockReading:
        observed = median(clocks) if clocks else None
        requested = self.requested_mhz
        reading = ClockReading(
            requested_mhz=requested,
            observed_mhz=observed,
            lowest_mhz=min(clocks, default=None),
            highest_mhz=max(clocks, default=None),
            held=observed is not None
            and requested is not None
            and abs(observed - requested) <= _TOLERANCE_MHZ,
            throttle_reasons=tuple(sorted(reasons - {"gpu_idle"})),
        )
        if requested is not None and observed is not None and not reading.held:
            why = ", ".join(reading.throttle_reasons) or "no reason is given"
            logger.warning(
                "%s runs at %.0f MHz under load instead of the %d MHz asked for (%s)",
                self._control.device_name,
                observed,
                requested,
                why,
            )
        return reading


@contextlib.contextmanager
def locked_clocks(
    clock_mhz: int,
    *,
    device: str | int | None = None,
    memory_mhz: int | None = None,
    required: bool = False,
    control: ClockControl | None = None,
) -> Iterator[LockedClocks]:
    """Lock the core clock of a GPU inside the block; release it afterwards, whatever happens.

    Args:
        clock_mhz: wanted core clock. The GPU takes the nearest it supports; read it back.
        device: as in `tvm_energy.meters.nvml.open_nvml_meter`; ignored where ``control`` is given.
        memory_mhz: wanted memory clock; None, the default, leaves it alone.
        required: raise where the clock cannot be locked; else one warning is logged and the block
            runs with ``active`` False (it only measures).
        control: the clocks to use, for example those of a simulated card.

    Yields:
        What to read back from and to change the clock with.

    Raises:
        ClockUnavailable: ``required``, and no permission or no support; another process holds the
            clocks of this GPU; or they could not be released at the end.
        ConfigurationError: the GPU does not support this clock.
        MeterUnavailable: no such GPU.
    """
    _check_mhz(clock_mhz)
    if memory_mhz is not None:
        _check_mhz(memory_mhz)
    with contextlib.ExitStack() as stack:
        if control is None:
            control = stack.enter_context(contextlib.closing(open_clock_control(device)))
        if not control.simulated:
            stack.enter_context(_held_alone(control))
        clocks = LockedClocks(control)
        release = _Release(control)
        stack.callback(release)
        stack.enter_context(_released_at_signals(release))
        try:
            release.pending = True
            _write_state(control, clock_mhz, memory_mhz)
            control.lock(clock_mhz)
            clocks.requested_mhz = clock_mhz
            if memory_mhz is not None:
                release.memory = True
                control.lock_memory(memory_mhz)
                clocks.requested_memory_mhz = memory_mhz
            clocks.active = True
        except ClockUnavailable as exc:
            release.forget_if_nothing_locked(clocks)
            if required:
                raise
            clocks.reason = str(exc)
            logger.warning("%s; clocks are left as they are and only measured", exc)
        yield clocks


def left_locked(directory: Path | None = None) -> list[LeftLocked]:
    """Clocks that processes of ours have locked and not released, by the state files.

    Args:
        directory: where the state files lie; None is that of the device locks.
    """
    found = []
    for path in sorted((directory or shared_directory()).glob(f"{_PREFIX}*{_SUFFIX}")):
        state = _read_state(path)
        if state is not None:
            found.append(state)
    return found


def restore_clocks(
    device: str | int | None = None,
    *,
    force: bool = False,
    control: ClockControl | None = None,
) -> LeftLocked | None:
    """Release the clocks of one GPU, whoever locked them.

    Args:
        device: as in `locked_clocks`.
        force: also where a process that still runs holds them.
        control: the clocks to use.

    Returns:
        What the state file said, or None where there was none (the clocks are released all the same).

    Raises:
        ClockUnavailable: a running process holds them (without ``force``), or they cannot be released.
        MeterUnavailable: no such GPU.
    """
    with contextlib.ExitStack() as stack:
        if control is None:
            control = stack.enter_context(contextlib.closing(open_clock_control(device)))
        state = _read_state(_state_path(control.device_uuid))
        if state is not None and state.alive and not force:
            raise ClockUnavailable(
                f"process {state.pid} holds the clocks of {control.device_name} and will release them "
                "itself; end it, or use --force"
            )
        control.reset()
        if state is not None and state.memory_mhz is not None:
            control.reset_memory()
        _clear_state(control)
        return state


class _Release:
    """Releases what was locked, once, and clears the state file."""

    def __init__(self, control: ClockControl) -> None:
        self.pending = False
        self.memory = False
        self._control = control
        self._found = None if control.simulated else _read_state(_state_path(control.device_uuid))
        self._mutex = threading.RLock()
        self._pid = os.getpid()

    def __call__(self) -> None:
        with self._mutex:
            if not self.pending or os.getpid() != self._pid:  # a fork must not release its parent's
                return
            self.pending = False
            try:
                self._control.reset()
                if self.memory:
                    self._control.reset_memory()
            except ClockUnavailable as exc:
                raise ClockUnavailable(
                    f"the clocks of {self._control.device_name} stay locked: {exc}; when the cause is "
                    "mended, run: tvm-energy clocks restore"
                ) from exc
            _clear_state(self._control)

    def forget_if_nothing_locked(self, clocks: LockedClocks) -> None:
        """After a lock that failed: nothing to release, unless the core clock was locked before."""
        if clocks.requested_mhz is None:
            self.pending = False
            with contextlib.suppress(ClockUnavailable):
                if self._found is None:
                    _clear_state(self._control)
                else:  # what a killed process has locked is still to be released
                    _replace(self._control, json.dumps(asdict(self._found)))
        else:
            self.memory = False
            self()
            clocks.requested_mhz = None


@contextlib.contextmanager
def _released_at_signals(release: _Release) -> Iterator[None]:
    """Turn the signals that would end the process into exceptions, so that the block is left in order.

    While clocks are being released, a signal waits. Handlers that the program has set itself stay:
    they decide how the program ends. Python lets only the main thread set handlers; in another thread
    the end of the interpreter and the state file remain.
    """
    atexit.register(release)
    before: dict[signal.Signals, Any] = {}
    waiting: list[int] = []
    leaving = False

    def handle(number: int, frame: FrameType | None) -> None:
        if leaving:
            waiting.append(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        leaving = True
        try:
            release()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            atexit.unregister(release)
        if waiting:
            os.kill(os.getpid(), waiting[0])


@contextlib.contextmanager
def _held_alone(control: ClockControl) -> Iterator[None]:
    """One process at a time sets the clocks of a GPU."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(device_lock(_lock_key(control.device_uuid), timeout_s=0))
        except MeterUnavailable as exc:
            raise ClockUnavailable(
                f"the clocks of {control.device_name} are held already: {exc}"
            ) from exc
        yield


# ---- the state file ---------------------------------------------------------------------------


def _lock_key(uuid: str) -> str:
    return f"clocks-{uuid}"


def _state_path(uuid: str, directory: Path | None = None) -> Path:
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in uuid)
    return (directory or shared_directory()) / f"{_PREFIX}{name}{_SUFFIX}"


def _write_state(control: ClockControl, clock_mhz: int | None, memory_mhz: int | None) -> None:
    """Say what is about to be locked, on disk, before it is."""
    if control.simulated:
        return
    state = LeftLocked(
        device_uuid=control.device_uuid,
        device_name=control.device_name,
        pid=os.getpid(),
        clock_mhz=clock_mhz,
        memory_mhz=memory_mhz,
        since=time.time(),
        alive=True,
    )
    _replace(control, json.dumps(asdict(state)))


def _clear_state(control: ClockControl) -> None:
    """An empty file says that nothing is locked; another user could not remove it from /tmp."""
    if not control.simulated and _state_path(control.device_uuid).exists():
        _replace(control, "")


def _replace(control: ClockControl, text: str) -> None:
    path = _state_path(control.device_uuid)
    try:
        descriptor = open_shared(path)
    except MeterUnavailable as exc:
        raise ClockUnavailable(f"clocks cannot be locked without a state file: {exc}") from exc
    try:
        data = text.encode()
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    except OSError as exc:
        raise ClockUnavailable(
            f"the state file {path} cannot be written ({exc.strerror}); remove it"
        ) from exc
    finally:
        os.close(descriptor)


def _read_state(path: Path) -> LeftLocked | None:
    """What a state file says; None where it is absent, empty or not ours."""
    try:
        # No link, and no pipe that never answers: anybody may put a file there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            values = json.loads(os.read(descriptor, _LONGEST_STATE))
        finally:
            os.close(descriptor)
        uuid = str(values["device_uuid"])
        state = LeftLocked(
            device_uuid=uuid,
            device_name=str(values["device_name"]),
            pid=int(values["pid"]),
            clock_mhz=_optional_int(values.get("clock_mhz")),
            memory_mhz=_optional_int(values.get("memory_mhz")),
            since=float(values["since"]),
            alive=lock_owner(_lock_key(uuid), path.parent) is not None,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return state if path == _state_path(uuid, path.parent) else None


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _check_mhz(clock_mhz: int) -> None:
    if isinstance(clock_mhz, bool) or not isinstance(clock_mhz, int) or clock_mhz <= 0:
        raise ValueError(f"a clock must be a positive whole number of MHz, got {clock_mhz!r}")
