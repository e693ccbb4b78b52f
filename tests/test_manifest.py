"""An exported folder's clock, found and locked without TVM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tvm_energy.errors import ConfigurationError, RecordFormatError
from tvm_energy.manifest import clock_of, deployed_clock, read_manifest
from tvm_energy.meters.nvml_clocks import open_clock_control
from tvm_energy.simulation.devices import find_device
from tvm_energy.simulation.load import SimulatedGpu


def manifest(*clocks: Any) -> dict[str, Any]:
    return {
        "format": "tvm-energy-export",
        "version": 1,
        "kernels": [
            {"task": f"task{i}", "workload": f"w{i}", "clock_mhz": clock}
            for i, clock in enumerate(clocks)
        ],
    }


def write(folder: Path, value: Any) -> Path:
    (folder / "manifest.json").write_text(json.dumps(value))
    return folder


def test_the_clock_of_the_export_is_held_inside_the_block(tmp_path: Path) -> None:
    gpu = SimulatedGpu(find_device("a100"))
    control = open_clock_control(nvml=gpu.nvml())
    write(tmp_path, manifest(1005.0, 1005.0))
    with deployed_clock(tmp_path, control=control) as clocks:
        assert clocks is not None
        assert clocks.requested_mhz == 1005
        assert gpu.clock_mhz == 1005
    assert gpu.clock_mhz is None
    with pytest.raises(RuntimeError), deployed_clock(tmp_path, control=control):
        raise RuntimeError
    assert gpu.clock_mhz is None


def test_an_export_for_the_default_clock_locks_nothing(tmp_path: Path) -> None:
    gpu = SimulatedGpu(find_device("a100"))
    earlier = manifest(None)
    del earlier["kernels"][0]["clock_mhz"]  # as written before there was a clock
    for value in (manifest(None, None), earlier):
        with deployed_clock(
            write(tmp_path, value), control=open_clock_control(nvml=gpu.nvml())
        ) as clocks:
            assert clocks is None
            assert gpu.clock_mhz is None


def test_kernels_with_clocks_of_their_own_are_named() -> None:
    value = manifest(1005.0, None)
    assert clock_of(value, "task0") == clock_of(value, "w0") == 1005
    assert clock_of(value, "task1") is None
    with pytest.raises(ConfigurationError, match=r"task0 \(1005.0\), task1 \(default\)"):
        clock_of(value)
    with pytest.raises(ConfigurationError, match="no kernel called 'task9'"):
        clock_of(value, "task9")


@pytest.mark.parametrize("clock", ["1005", True, -5, 0, 1e9, [], float("1e300")])
def test_what_is_no_clock_is_not_locked(clock: Any) -> None:
    with pytest.raises(RecordFormatError, match="no clock in MHz"):
        clock_of(manifest(clock) if not isinstance(clock, list) else manifest(str(clock)))


def test_a_folder_that_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tvm-energy export"), deployed_clock(tmp_path):
        pytest.fail("locked")
    for value in ([], {"format": "other"}, manifest() | {"version": 2}):
        with pytest.raises(RecordFormatError):
            read_manifest(write(tmp_path, value))
