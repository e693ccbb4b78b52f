"""What doctor finds on a GPU, on the stand-in library and in fake file systems."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_zeusd import serving
from nvml_standin import standin_environment

from tvm_energy.doctor import check_container, check_driver
from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.nvml_capabilities import clock_control
from tvm_energy.meters.zeusd import Zeusd

Run = Callable[..., Any]

PROBE = """
import dataclasses, json, os
from tvm_energy.doctor import _list_gpus, _probe, check_driver, check_visible, _driver_versions
found = {item.name: dataclasses.asdict(item) for item in _probe(_list_gpus()[0])}
more = [*check_driver(_driver_versions), *check_visible(_list_gpus, os.environ)]
print(json.dumps([found, [dataclasses.asdict(item) for item in more]]))
"""


def probe(run: Run, knobs: str = "", **environment: str) -> dict[str, Any]:
    return run(PROBE, knobs, **environment)[0]


def test_a_gpu_that_can_do_everything(on_standin: Run) -> None:
    found = probe(on_standin, "mig 0")
    assert set(found) == {
        "counter",
        "instant power",
        "average power",
        "power usage",
        "power limit",
        "clocks",
        "clock control",
        "temperature",
        "throttling",
        "persistence",
        "mig",
        "processes",
    }
    assert {item["severity"] for name, item in found.items() if name != "clock control"} == {"ok"}
    assert "core 1500 MHz, memory 2619 MHz" in found["clocks"]["text"]
    assert (
        "gpu 49." in found["instant power"]["text"] or "gpu 50." in found["instant power"]["text"]
    )


#: Knobs -> capability, its severity, and a part of its text.
CASES = [
    ("fail GetTotalEnergyConsumption 3", "counter", "info", "no cumulative energy counter"),
    ("counter_stuck 0", "counter", "warning", "stands still"),
    ("field_error 186 0 3", "instant power", "info", "in any scope"),
    ("field_error 185 0 4", "average power", "info", "no permission"),
    ("field_scope 186 1", "instant power", "ok", "module"),
    ("fail GetPowerUsage 3", "power usage", "info", "no power usage"),
    ("power -1 0 5000", "power usage", "warning", "not plausible"),
    ("fail GetEnforcedPowerLimit 3", "power limit", "info", "not told"),
    ("fail GetClockInfo 3", "clocks", "info", "not every clock"),
    ("fail GetTemperature 3", "temperature", "info", "cannot be read"),
    ("throttle 32", "throttling", "warning", "sw_thermal_slowdown"),
    ("throttle 4", "throttling", "ok", "sw_power_cap"),
    ("mig 1", "mig", "warning", "whole GPU"),
    ("process 0 1", "processes", "warning", "pid 1 "),
    ("process 0 4194303", "processes", "warning", "pid 4194303)"),
]


def test_each_capability_by_itself(on_standin: Run) -> None:
    code = f"""
    import dataclasses, json, os
    from pathlib import Path
    from tvm_energy.doctor import _list_gpus, _probe
    found = []
    for knobs, name, _, _ in {CASES!r}:
        Path(os.environ["NVML_STANDIN"]).write_text(knobs)  # read whenever NVML starts
        items = {{item.name: dataclasses.asdict(item) for item in _probe(_list_gpus()[0])}}
        found.append(items[name])
    print(json.dumps(found))
    """
    for item, (knobs, _, severity, text) in zip(on_standin(code), CASES, strict=True):
        assert item["severity"] == severity, knobs
        assert text in item["text"], knobs
        assert severity == "ok" or item["remedy"], knobs


def test_a_jetson_that_answers_nothing(on_standin: Run) -> None:
    knobs = (
        "fail GetTotalEnergyConsumption 3\nfail GetPowerUsage 3\nfail GetFieldValues 3\n"
        "fail GetClockInfo 3\nfail GetTemperature 3\nfail GetEnforcedPowerLimit 3\n"
        "fail GetCurrentClocksEventReasons 3\nfail GetCurrentClocksThrottleReasons 3"
    )
    found = probe(on_standin, knobs)
    missing = {name for name, item in found.items() if item["severity"] == "info"}
    assert missing >= {"counter", "instant power", "power usage", "clocks", "temperature"}


def test_versions_and_what_is_visible(on_standin: Run) -> None:
    _, more = on_standin(PROBE, "gpus 2\ndriver 525.60", CUDA_VISIBLE_DEVICES="1")
    texts = [item["text"] for item in more]
    assert any("driver 525.60, nvml 12.525.60" in text for text in texts)
    assert any("no instant power" in text for text in texts)
    assert any("visible are 1 (GPU-standin-1)" in text for text in texts)
    _, more = on_standin(PROBE, "gpus 2", CUDA_VISIBLE_DEVICES="")
    assert any(item["severity"] == "warning" and "hides every" in item["text"] for item in more)


def test_a_library_of_another_version_than_the_module() -> None:
    versions = {"driver": "550.54.15", "module": "550.40.07"}
    _, finding = check_driver(lambda: versions)
    assert (finding.severity, "550.40.07" in finding.text) == ("warning", True)
    assert len(list(check_driver(lambda: versions | {"module": "550.54.15"}))) == 1

    def none() -> dict[str, str | None]:
        raise MeterUnavailable("no driver")

    assert list(check_driver(none)) == []


def test_clock_control_is_found_without_touching_a_clock(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert clock_control(None, True, 1 << 21).severity == "ok"
    assert clock_control(None, True, 0).severity == "info"  # root in a container
    assert "zeusd" in clock_control(None, False, 0).remedy
    path = tmp_path_factory.mktemp("z") / "s"
    with serving(path) as daemon:
        assert "through zeusd" in clock_control(Zeusd(path), False, 0).text
        daemon.discovery["enabled_api_groups"] = ["gpu-read"]
        assert "without gpu-control" in clock_control(Zeusd(path), False, 0).text
        assert daemon.requests == []
    assert "does not answer" in clock_control(Zeusd(path), False, 0).text


def files(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_containers_and_wsl(tmp_path: Path) -> None:
    assert list(check_container(tmp_path, {})) == []
    docker = files(tmp_path / "a", proc__1__cgroup="0::/docker/abc")
    (finding,) = check_container(docker, {})
    assert finding.severity == "info"
    assert "--pid=host" in (finding.remedy or "")
    podman = files(tmp_path / "b", run__x="")
    (podman / "run" / ".containerenv").write_text("")
    without_nvml = {"NVIDIA_DRIVER_CAPABILITIES": "compute", "NVIDIA_VISIBLE_DEVICES": "void"}
    texts = [item.text for item in check_container(podman, without_nvml)]
    assert any("leaves out NVML" in text for text in texts)
    assert any("keeps every GPU out" in text for text in texts)
    assert len(list(check_container(podman, {"NVIDIA_DRIVER_CAPABILITIES": "all"}))) == 1
    wsl = files(tmp_path / "c", proc__version="Linux 5.15 Microsoft standard WSL2")
    assert [item.topic for item in check_container(wsl, {})] == ["wsl"]


def test_a_self_test_decides_which_sensor_a_run_opens(
    standin_library: Path, tmp_path: Path
) -> None:
    """The counter says 60 % of what the two other sensors say."""
    environment = standin_environment(
        standin_library, "power -1 0 100\ngain 0.6\nperiod 0.05", tmp_path
    ) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    test = (
        "import json; from tvm_energy.doctor import _idle_self_test as test\n"
        "from tvm_energy.self_test import save_self_test\n"
        "result = test('cuda:0', 1.0); save_self_test(result); print(json.dumps(result.to_json()))"
    )
    result = json.loads(python("-c", test).stdout)
    assert (result["field"], result["agree"]) == ("instant", False)
    code = (
        "import json; from tvm_energy.meta_schedule import compat\n"
        "from tvm_energy.meta_schedule.device import open_device\n"
        "device = open_device('cuda', 'nvidia/nvidia-a100'); print(json.dumps(device.meter))"
    )
    opened = python("-c", code)
    meter = json.loads(opened.stdout.splitlines()[-1])
    assert meter["method"] == "power_integral"
    assert meter["self_test"]["field"] == "instant"
    measured = python(
        "-m", "tvm_energy.cli", "measure", "--idle", "0", "--json", "--", "sleep", "1"
    )
    (device,) = json.loads(measured.stdout)["devices"]
    assert device["method"] == "power_integral"
    assert device["mean_power_w"] == pytest.approx(100, rel=0.02)
