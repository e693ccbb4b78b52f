"""`scripts/gpu_check.py` without a GPU, and on the stand-in library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_standin import TESTS, build_library

SCRIPT = TESTS.parent / "scripts" / "gpu_check.py"


def run(*arguments: str, knobs: str | None = None, folder: Path, library: Path | None = None):
    environment = {**os.environ}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if library is not None:
        path = folder / "knobs.txt"
        path.write_text(knobs or "")
        environment |= {"LD_LIBRARY_PATH": str(library), "NVML_STANDIN": str(path)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler")
    return build_library(tmp_path_factory.mktemp("nvml"))


def test_without_a_gpu_it_says_what_it_would_do(library: Path, tmp_path: Path) -> None:
    done = run(knobs="fail InitWithFlags 9", folder=tmp_path, library=library)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["gpu"] is None
    assert "driver is not loaded" in result["reason"]
    assert [line.split(":")[0] for line in result["would_do"]] == [
        "update_period",
        "counter_and_power",
        "repeatability",
        "two_kernels",
    ]


def test_on_the_standin(library: Path, tmp_path: Path) -> None:
    # The stand-in has no function that sets anything: a call of one would be an error.
    out = tmp_path / "h200.json"
    arguments = ("--load", "sleep", "--quick", "--json", "--out", str(out))
    knobs = "name 0 NVIDIA H200\npower -1 0 180\nperiod 0.02\nfail GetPowerUsage 3\n"
    done = run(*arguments, knobs=knobs, folder=tmp_path, library=library)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert json.loads(out.read_text()) == result
    assert result["complete"]
    assert result["load"].startswith("sleep")
    assert result["update_period"]["counter"]["median_ms"] == pytest.approx(20, rel=0.1)
    compared = result["counter_and_power"]
    assert compared["load_w"]["counter"] == pytest.approx(180, rel=0.03)
    assert compared["load_w"]["instant"] == pytest.approx(180, rel=0.03)
    assert compared["largest_difference"] < 0.05
    repeated = result["repeatability"]
    assert len(repeated["measurements"]) == 3
    assert repeated["power_w"] == pytest.approx(180, rel=0.03)
    assert 0 <= repeated["scatter"] < 0.1
    same, more = result["two_kernels"]["pairs"]
    assert more["told_apart"]
    assert more["difference"] == pytest.approx(0.2, abs=0.1)
    assert abs(same["difference"]) < 0.1

    again = run(*arguments, knobs=knobs, folder=tmp_path, library=library)
    assert again.returncode == 0
    assert again.stderr.count("done in an earlier run") == 4
    other = run(*arguments, knobs=knobs + "driver 999", folder=tmp_path, library=library)
    assert other.returncode == 2
    assert "another card, driver or load" in other.stderr


def test_wrong_arguments(library: Path, tmp_path: Path) -> None:
    assert run("--time-limit", "0", folder=tmp_path).returncode == 2
    lost = run("--gpu", "5", folder=tmp_path, library=library)
    assert lost.returncode == 0
    assert "there is no GPU 5" in lost.stdout
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    done = run("--load", "sleep", "--out", str(torn), folder=tmp_path, library=library)
    assert done.returncode == 2
    assert "is no file of results" in done.stderr


def test_the_time_limit_leaves_steps_out(library: Path, tmp_path: Path) -> None:
    arguments = ("--load", "sleep", "--quick", "--time-limit", "0.5")
    done = run(
        *arguments, knobs="power -1 0 180\nfail GetPowerUsage 3", folder=tmp_path, library=library
    )
    assert done.returncode == 1
    assert done.stdout.count("left out") == 4
    assert not json.loads(done.stdout.splitlines()[-1])["complete"]


def test_the_tvm_load_knows_how_long_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The multiply-adds on the processor: more work takes longer, and TVM's timer says so."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from gpu_check import tvm_loads

    from tvm_energy.meters.base import TimedLoad

    make = tvm_loads("cpu", str(tmp_path))
    seconds = []
    for work in (0.0, 4.0):
        load = make(work)
        assert isinstance(load, TimedLoad)
        load.enqueue(40)
        load.synchronize()
        seconds.append(load.device_seconds())
        load.enqueue(1)
        load.synchronize()
        assert load.device_seconds() is None  # a single launch is not timed
    assert seconds[0] is not None
    assert 1.5 * seconds[0] < seconds[1] < 20 * seconds[0]
