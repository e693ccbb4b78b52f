from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_energy.doctor import (
    Finding,
    check_clocks_left,
    check_compiler,
    check_gpus,
    check_packages,
    check_python,
    check_rapl,
    check_simulated,
    check_tvm_loads,
    check_tvm_versions,
    diagnose,
    installed_version,
)
from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.nvml import GpuInfo
from tvm_energy.meters.nvml_capabilities import Capability
from tvm_energy.meters.rapl import open_rapl_meter

PACKAGES = {"xgboost": "3.2.0", "nvidia-ml-py": "13.615.71", "onnx": "1.23.2"}


def severities(findings) -> dict[str, str]:
    return {finding.topic: finding.severity for finding in findings}


def packages(**changes: str | None) -> list[Finding]:
    installed = PACKAGES | {name.replace("_", "-"): value for name, value in changes.items()}
    return list(check_packages(installed.get))


def test_this_machine_is_well_enough_to_run_the_tests() -> None:
    findings = diagnose()
    assert [finding for finding in findings if finding.severity == "error"] == []
    assert {"tvm-energy", "python", "xgboost", "tvm", "compiler", "rapl", "simulation"} <= set(
        severities(findings)
    )
    for finding in findings:
        assert finding.text
        assert "\n" not in finding.text
        assert finding.severity == "ok" or finding.remedy


def test_python_versions() -> None:
    assert severities(check_python((3, 10))) == {"python": "ok"}
    assert severities(check_python((3, 13))) == {"python": "ok"}
    assert severities(check_python((3, 9))) == {"python": "warning"}
    assert severities(check_python((3, 14))) == {"python": "warning"}


def test_complete_packages_are_fine() -> None:
    assert severities(packages()) == {"xgboost": "ok", "nvidia-ml-py": "ok", "onnx": "ok"}


def test_the_cpu_build_of_xgboost_counts() -> None:
    assert severities(packages(xgboost=None, xgboost_cpu="3.2.0"))["xgboost"] == "ok"


@pytest.mark.parametrize(
    ("name", "severity", "remedy"),
    [
        ("xgboost", "error", "pip install xgboost"),
        ("nvidia_ml_py", "warning", "pip install nvidia-ml-py"),
        ("onnx", "info", 'pip install "tvm-energy[onnx]"'),
    ],
)
def test_a_missing_package_has_its_command(name: str, severity: str, remedy: str) -> None:
    (finding,) = [item for item in packages(**{name: None}) if item.severity != "ok"]
    assert (finding.severity, finding.remedy) == (severity, remedy)
    assert "not installed" in finding.text


@pytest.mark.parametrize(("version", "trouble"), [("11.5.3", True), ("12.0.0", False)])
def test_old_pynvml_hides_the_right_module(version: str, trouble: bool) -> None:
    findings = [item for item in packages(pynvml=version) if item.severity != "ok"]
    assert bool(findings) == trouble
    if trouble:
        assert findings[0].remedy is not None
        assert findings[0].remedy.startswith("pip uninstall -y pynvml")


def test_the_installed_pair_works() -> None:
    assert severities(check_tvm_versions()) == {"tvm": "ok"}


def test_a_bad_pair_is_reported_without_loading_tvm(tmp_path: Path) -> None:
    """A real environment whose metadata say tvm-ffi 0.1.15, in a process of its own."""
    info = tmp_path / "apache_tvm_ffi-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15\n")
    code = (
        "import sys, json, dataclasses, tvm_energy.doctor as d; found = d.diagnose(); "
        "print(json.dumps([dataclasses.asdict(item) for item in found if item.topic == 'tvm'])); "
        "print('tvm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    findings, loaded = done.stdout.splitlines()
    (finding,) = json.loads(findings)
    assert finding["severity"] == "error"
    assert "0.1.15 would crash" in finding["text"]
    assert finding["remedy"].startswith("pip install")
    assert loaded == "False"


def test_tvm_that_does_not_load_is_an_error() -> None:
    (finding,) = check_tvm_loads(lambda: "killed by signal 11")
    assert finding.severity == "error"
    assert "killed by signal 11" in finding.text


def test_tvm_without_llvm_is_an_error() -> None:
    assert [f.severity for f in check_tvm_loads(lambda: {"kinds": ["llvm", "cuda"]})] == ["ok"]
    assert [f.severity for f in check_tvm_loads(lambda: {"kinds": []})] == ["ok", "error"]


def test_compiler_is_found_or_asked_for() -> None:
    assert severities(check_compiler(shutil.which)) == {"compiler": "ok"}
    (finding,) = check_compiler(lambda name: None)
    assert (finding.severity, finding.remedy) == (
        "warning",
        "install one, for example: apt-get install g++",
    )
    (finding,) = check_compiler(shutil.which, "no-such-compiler")
    assert "no-such-compiler" in finding.text


def gpu(index: int = 0, **changes) -> GpuInfo:
    values = {
        "uuid": f"GPU-{index}",
        "name": "NVIDIA A100",
        "driver_version": "570.0",
        "sensors": ("energy counter",),
    }
    return GpuInfo(index=index, **(values | changes))


def test_good_gpus() -> None:
    findings = list(check_gpus(lambda: [gpu(0), gpu(1)], has_cuda_compiler=True))
    assert severities(findings) == {"gpu 0": "ok", "gpu 1": "ok"}
    assert "GPU-1" in findings[1].text
    assert "energy counter" in findings[1].text


def test_a_gpu_without_compiler_is_a_warning() -> None:
    assert severities(check_gpus(lambda: [gpu()], has_cuda_compiler=False))["cuda"] == "warning"
    assert "cuda" not in severities(check_gpus(lambda: [], has_cuda_compiler=False))


def test_a_gpu_that_cannot_be_measured_says_why() -> None:
    problem = "no energy counter and no power sensor answers; update the driver"
    (finding,) = check_gpus(lambda: [gpu(problem=problem, sensors=())], has_cuda_compiler=True)
    assert finding.severity == "warning"
    assert "no power sensor answers" in finding.text
    assert finding.remedy == "update the driver; or use --device sim:a100"


def test_what_a_probe_finds_is_listed_under_the_gpu() -> None:
    item = Capability(name="processes", severity="warning", text="pid 11", remedy="end it")
    _, finding = check_gpus(lambda: [gpu()], True, probe=lambda _: [item])
    assert finding == Finding(
        severity="warning", topic="gpu 0 processes", text="pid 11", remedy="end it"
    )


def test_clocks_left_locked_are_named(tmp_path: Path) -> None:
    assert list(check_clocks_left(tmp_path)) == []
    state = {
        "device_uuid": "GPU-1",
        "device_name": "X",
        "pid": 12,
        "clock_mhz": 900,
        "memory_mhz": None,
        "since": 1.0,
    }
    (tmp_path / "tvm_energy-clocks-GPU-1.json").write_text(json.dumps(state))
    (finding,) = check_clocks_left(tmp_path)
    assert finding.severity == "warning"
    assert "locked at 900 MHz" in finding.text
    assert finding.remedy == "tvm-energy clocks restore"


def test_no_gpu_is_no_error() -> None:
    def none() -> list[GpuInfo]:
        raise MeterUnavailable("the library libnvidia-ml.so.1 was not found; install the driver")

    (finding,) = check_gpus(none, has_cuda_compiler=False)
    assert finding.severity == "info"
    assert finding.remedy == "install the driver; or use --device sim:a100"
    assert [f.severity for f in check_gpus(list, has_cuda_compiler=False)] == ["info"]


def test_rapl_that_is_absent(tmp_path: Path) -> None:
    (finding,) = check_rapl(lambda: open_rapl_meter(root=tmp_path))
    assert finding.severity == "info"
    assert finding.remedy is not None


def test_rapl_that_answers() -> None:
    class Info:
        device_name, scope = "Xeon", "package"

    class Meter:
        info = Info

        def close(self) -> None:
            pass

    (finding,) = check_rapl(Meter)
    assert (finding.severity, "Xeon" in finding.text) == ("ok", True)


def test_simulated_devices_are_listed() -> None:
    (finding,) = check_simulated()
    assert "sim:a100" in finding.text


def test_installed_version() -> None:
    assert installed_version("numpy")
    assert installed_version("no-such-distribution-of-ours") is None
