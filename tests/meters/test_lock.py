from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.lock import device_lock

HOLD = """
import sys, time
from pathlib import Path
from tvm_energy.meters.lock import device_lock
with device_lock(sys.argv[1], directory=Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def holder(key: str, directory: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, key, str(directory), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    process = holder("GPU-1", tmp_path, 30)
    try:
        with (
            pytest.raises(MeterUnavailable, match=f"process {process.pid}"),
            device_lock("GPU-1", timeout_s=0.2, directory=tmp_path),
        ):
            pytest.fail("two processes measure on one device")
        with device_lock("GPU-2", timeout_s=0, directory=tmp_path):
            pass  # another device is free
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_dies_frees_the_device(tmp_path: Path) -> None:
    process = holder("GPU-1", tmp_path, 30)
    process.kill()
    process.communicate()
    with device_lock("GPU-1", timeout_s=5, directory=tmp_path) as path:
        assert path.read_text() == f"{os.getpid()}\n"


def test_waiting_ends_when_the_device_is_free_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = holder("GPU-1", tmp_path, 1.5)
    started_s = time.monotonic()
    with device_lock("GPU-1", timeout_s=30, directory=tmp_path):
        waited_s = time.monotonic() - started_s
    process.communicate()
    assert 0.5 < waited_s < 20
    assert f"process {process.pid}" in caplog.text


def test_the_lock_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(3):
        with device_lock("GPU-1", timeout_s=0, directory=tmp_path):
            pass


def test_every_user_may_lock_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with device_lock("GPU-1", directory=tmp_path) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_a_key_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    with device_lock("../../etc/passwd /x", directory=tmp_path) as path:
        assert path.parent == tmp_path


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "tvm_energy-GPU-1.lock").symlink_to(target)
    with (
        pytest.raises(MeterUnavailable, match="cannot open the lock file"),
        device_lock("GPU-1", directory=tmp_path),
    ):
        pytest.fail("followed")
    assert not target.exists()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with (
        pytest.raises(MeterUnavailable, match="missing"),
        device_lock("GPU-1", directory=missing),
    ):
        pytest.fail("locked nothing")


def test_the_default_directory_is_shared() -> None:
    with device_lock(f"test-{os.getpid()}") as path:
        assert path.exists()
    path.unlink()
