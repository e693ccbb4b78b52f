"""One measuring process at a time on a device.

Two kernels that run together share one power sensor, so neither measurement would mean anything.
The lock is advisory (``flock``), is released by the kernel when its process dies, and holds across
users, since all of them see the same file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tvm_energy.errors import MeterUnavailable

logger = logging.getLogger(__name__)

#: Names the directory of the lock files, for machines where /tmp is private to each job.
DIRECTORY_VARIABLE = "TVM_ENERGY_LOCK_DIR"

_POLL_S = 0.05
_SAY_SO_AFTER_S = 1.0


@contextlib.contextmanager
def device_lock(
    key: str, *, timeout_s: float = 600.0, directory: Path | None = None
) -> Iterator[Path]:
    """Hold the device for this process.

    Args:
        key: identifies the device, for example the UUID of a GPU.
        timeout_s: how long to wait for another process; 0 does not wait.
        directory: where the lock file lies; None is `shared_directory`.

    Yields:
        The path of the lock file. It stays there afterwards: removing it would let two processes
        hold two different files of one name.

    Raises:
        MeterUnavailable: another process kept the device, or the lock file cannot be opened.
    """
    path = lock_path(key, directory)
    descriptor = open_shared(path)
    try:
        _wait_for(descriptor, path, key, timeout_s)
        _write_owner(descriptor)
        yield path
    finally:
        os.close(descriptor)  # closing releases the lock


def lock_owner(key: str, directory: Path | None = None) -> int | None:
    """Pid of the process that holds the device; None where it is free. Does not wait.

    A process that holds it but cannot be named (another user's container) is 0.
    """
    path = lock_path(key, directory)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _owner_pid(path) or 0
    finally:
        os.close(descriptor)
    return None


def shared_directory() -> Path:
    """The directory that all users' processes agree on: $TVM_ENERGY_LOCK_DIR, or /tmp."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    if configured:
        return Path(configured)
    # TMPDIR is often private to a user or a job; a lock there would exclude nobody else.
    shared = Path("/tmp")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def lock_path(key: str, directory: Path | None = None) -> Path:
    """The lock file of a device."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", key)
    return (directory or shared_directory()) / f"tvm_energy-{name}.lock"


def open_shared(path: Path) -> int:
    """Open a file that every user may write, made by whoever comes first; its descriptor.

    The kernel refuses O_CREAT on another user's file in a sticky directory (sysctl
    fs.protected_regular), so an existing file is opened without it. Symbolic links are not followed.
    """
    common = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | common, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask: the next user must be able to lock
            return descriptor
        try:
            return os.open(path, os.O_RDWR | common)
        except PermissionError:
            return os.open(path, os.O_RDONLY | common)  # enough for flock
    except OSError as exc:
        raise MeterUnavailable(
            f"cannot open the lock file {path}: {exc.strerror}; remove it, or make its directory "
            "writable"
        ) from exc


def _wait_for(descriptor: int, path: Path, key: str, timeout_s: float) -> None:
    started_s = time.monotonic()
    told = False
    while not _try_lock(descriptor):
        waited_s = time.monotonic() - started_s
        if waited_s >= timeout_s:
            raise MeterUnavailable(
                f"{key} is being measured by another process ({_owner(path)}) and was not free "
                f"within {timeout_s:g} s; wait for it to end, or choose another device"
            )
        if waited_s >= _SAY_SO_AFTER_S and not told:
            logger.warning("waiting for %s, which %s is measuring", key, _owner(path))
            told = True
        time.sleep(_POLL_S)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise MeterUnavailable(
            f"the directory for temporary files does not support locks: {exc.strerror}"
        ) from exc
    return True


def _write_owner(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # opened read-only: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _owner(path: Path) -> str:
    pid = _owner_pid(path)
    return "process unknown" if pid is None else f"process {pid}"


def _owner_pid(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
