"""Whose GPU it is: CUDA_VISIBLE_DEVICES in every form, MIG, other processes, two measuring processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.lock import device_lock, lock_owner
from tvm_energy.meters.nvml_devices import GpuInfo, choose, cuda_name, visible_gpus

Run = Callable[..., Any]

INSTANCE = "MIG-11111111-aaaa-bbbb-cccc-222222222222"


def gpu(index: int, uuid: str, *instances: str) -> GpuInfo:
    return GpuInfo(
        index=index,
        uuid=uuid,
        name="X",
        driver_version="1",
        sensors=("s",),
        mig_enabled=bool(instances),
        mig_instances=instances,
    )


GPUS = [gpu(0, "GPU-aaaa-1"), gpu(1, "GPU-aabb-2"), gpu(2, "GPU-cccc-3", INSTANCE)]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 0 ", [1, 0]),
        ("1,1,0", [1, 0]),
        ("1,-1,0", [1]),  # CUDA ignores everything from the first invalid entry on
        ("1,9,0", [1]),
        ("1,,0", [1]),
        ("0,GPU-nonsense,1", [0]),
        ("GPU-cccc-3,GPU-aaaa-1", [2, 0]),
        ("gpu-CCCC", [2]),
        ("GPU-aab", [1]),
        ("GPU-aa", None),
        ("GPU-zz", None),
        ("9", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        (f"0,{INSTANCE}", [0]),
        (INSTANCE, None),
        ("MIG-GPU-cccc-3/1/0", None),
    ],
)
def test_cuda_visible_devices(value: str | None, indices: list[int] | None) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    if indices is None:
        with pytest.raises(MeterUnavailable):
            visible_gpus(GPUS, environ)
        with pytest.raises(MeterUnavailable):
            choose(GPUS, None, environ)
        return
    assert [item.index for item in visible_gpus(GPUS, environ)] == indices
    assert choose(GPUS, None, environ)[0].index == indices[0]


def test_a_uuid_that_begins_another_is_not_ambiguous() -> None:
    gpus = [gpu(0, "GPU-1"), gpu(1, "GPU-11")]
    assert choose(gpus, "GPU-1", {})[0].index == 0


@pytest.mark.parametrize(
    "name", [INSTANCE, INSTANCE[:12], "MIG-GPU-cccc-3/7/0", "mig-gpu-cccc/1/0"]
)
def test_a_mig_instance_by_force_is_the_whole_gpu(name: str) -> None:
    with pytest.raises(MeterUnavailable, match="--force"):
        choose(GPUS, name, {})
    chosen, _ = choose(GPUS, name, {}, force=True)
    assert chosen.index == 2
    assert choose(GPUS, None, {"CUDA_VISIBLE_DEVICES": name}, force=True)[0].index == 2
    # CUDA must be given the instance, not the GPU.
    assert cuda_name(chosen.uuid, name, {}) == name
    assert cuda_name(chosen.uuid, None, {"CUDA_VISIBLE_DEVICES": f"{name},1"}) == name


def test_cuda_is_given_the_uuid_otherwise() -> None:
    assert cuda_name("GPU-a", None, {}) == "GPU-a"
    assert cuda_name("GPU-a", 1, {"CUDA_VISIBLE_DEVICES": INSTANCE}) == "GPU-a"
    assert cuda_name("GPU-a", None, {"CUDA_VISIBLE_DEVICES": "3,1"}) == "GPU-a"


def test_an_unknown_instance() -> None:
    with pytest.raises(MeterUnavailable, match="is not a MIG instance here"):
        choose(GPUS, "MIG-999", {}, force=True)


@pytest.mark.parametrize(
    ("value", "hidden"), [("0", True), ("0,1", False), ("", True), (None, False)]
)
def test_a_gpu_hidden_from_cuda_is_noted(value: str | None, hidden: bool) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    _, notes = choose(GPUS, 1, environ)
    assert bool(notes) == hidden


OPEN = """
import json
from tvm_energy.errors import TvmEnergyError
from tvm_energy.meters.nvml import open_nvml_meter
try:
    print(json.dumps(open_nvml_meter({arguments}).info.to_json()))
except TvmEnergyError as exc:
    print(json.dumps({{"error": str(exc)}}))
"""


def test_a_divided_gpu_on_the_library(on_standin: Run) -> None:
    knobs = f"gpus 2\nmig 1\nmig_device 1 {INSTANCE}\n"
    assert "MIG is enabled" in on_standin(OPEN.format(arguments="1"), knobs)["error"]
    forced = on_standin(OPEN.format(arguments="1, force=True"), knobs)
    assert forced["device_uuid"] == "GPU-standin-1"
    assert any("whole GPU" in note for note in forced["notes"])
    code = OPEN.format(arguments="force=True")
    by_instance = on_standin(code, knobs, CUDA_VISIBLE_DEVICES=INSTANCE)
    assert by_instance["device_uuid"] == "GPU-standin-1"
    refused = on_standin(OPEN.format(arguments=""), knobs, CUDA_VISIBLE_DEVICES=INSTANCE)
    assert "--force" in refused["error"]


def test_force_does_not_make_sensors(on_standin: Run) -> None:
    knobs = "mig 1\nfail GetTotalEnergyConsumption 3\nfail GetPowerUsage 3\nfail GetFieldValues 3"
    assert "cannot be measured" in on_standin(OPEN.format(arguments="force=True"), knobs)["error"]


def test_own_processes_are_not_strangers(on_standin: Run) -> None:
    code = """
    import json, os, subprocess, sys
    from pathlib import Path
    from tvm_energy.meters.nvml import open_nvml_meter
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    stranger = int(os.environ["STRANGER"])
    pids = [os.getpid(), child.pid, stranger]
    knobs = "".join(f"process 0 {pid}\\n" for pid in pids)
    Path(os.environ["NVML_STANDIN"]).write_text(knobs)
    alone = open_nvml_meter(field="instant").info.notes
    child.kill(); child.wait()
    print(json.dumps([note for note in alone if "other processes" in note]))
    """
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (note,) = on_standin(code, STRANGER=str(stranger.pid))
        assert note.endswith(f"(pids {stranger.pid})")
        # In a worker of a tuning run the sibling belongs to the same run, the stranger's is its sibling here.
        assert on_standin(code, STRANGER=str(stranger.pid), TVM_ENERGY_WORKER="1") == []
    finally:
        stranger.kill()
        stranger.wait()


def test_two_processes_two_gpus_one_lock_each(on_standin: Run, tmp_path: Any) -> None:
    code = """
    import json, os, subprocess, sys
    from tvm_energy.errors import MeterUnavailable
    from tvm_energy.meters.lock import device_lock
    from tvm_energy.meters.nvml import open_nvml_meter
    outcomes = []
    for which in (0, 1):
        uuid = open_nvml_meter(which, field="instant").info.device_uuid
        try:
            with device_lock(uuid, timeout_s=0):
                outcomes.append("free")
        except MeterUnavailable:
            outcomes.append("held")
    print(json.dumps(outcomes))
    """
    with device_lock("GPU-standin-1", directory=tmp_path):
        assert on_standin(code, "gpus 2") == ["free", "held"]
        assert lock_owner("GPU-standin-1", tmp_path) == os.getpid()
    assert lock_owner("GPU-standin-1", tmp_path) is None
    assert lock_owner("GPU-never", tmp_path) is None


def test_the_lock_directory_can_be_set(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_ENERGY_LOCK_DIR", str(tmp_path))
    with device_lock("x") as path:
        assert path.parent == tmp_path
