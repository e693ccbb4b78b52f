from __future__ import annotations

import re
from pathlib import Path

import pytest

from tvm_energy.errors import ConfigurationError
from tvm_energy.simulation.devices import (
    A100,
    DEVICES,
    H200,
    ORIN_NANO,
    PICO,
    RTX4090,
    XAVIER_NX,
    DeviceSpec,
    find_device,
)

ALL = pytest.mark.parametrize("spec", list(DEVICES.values()), ids=list(DEVICES))


def test_names() -> None:
    assert list(DEVICES) == ["a100", "rtx4090", "h200", "orin-nano", "xavier-nx"]
    assert find_device("sim:A100") is A100


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"a100, rtx4090, h200, orin-nano, xavier-nx.*did you mean 'h200'"
    ):
        find_device("h20")


@pytest.mark.parametrize(
    ("spec", "fp32_tflops", "tensor_tflops", "dram_gb_s"),
    [
        (A100, 19.5, 312, 1555),
        (RTX4090, 82.6, 165, 1008),
        (H200, 67, 1070, 4800),
        (ORIN_NANO, 2.09, 16.75, 102.4),
        (XAVIER_NX, 0.85, 6.8, 51.2),
    ],
    ids=["a100", "rtx4090", "h200", "orin-nano", "xavier-nx"],
)
def test_peaks_are_those_of_the_data_sheets(
    spec: DeviceSpec, fp32_tflops: float, tensor_tflops: float, dram_gb_s: float
) -> None:
    clocks = spec.sms * spec.max_clock_mhz * 1e6
    assert 2 * spec.fp32_lanes * clocks / 1e12 == pytest.approx(fp32_tflops, rel=0.01)
    assert spec.tensor_flops_per_clock * clocks / 1e12 == pytest.approx(tensor_tflops, rel=0.01)
    assert spec.dram_bytes_per_s / 1e9 == dram_gb_s


@ALL
def test_voltage_is_flat_to_the_ridge_and_rises_to_one(spec: DeviceSpec) -> None:
    assert spec.voltage(spec.min_clock_mhz) == spec.voltage(spec.ridge_clock_mhz)
    assert spec.voltage(spec.max_clock_mhz) == pytest.approx(1)
    voltages = [spec.voltage(clock) for clock in spec.clocks_mhz]
    assert voltages == sorted(voltages)


@ALL
def test_clock_table(spec: DeviceSpec) -> None:
    assert spec.clocks_mhz[0] == spec.min_clock_mhz
    assert spec.clocks_mhz[-1] == spec.max_clock_mhz
    assert spec.nearest_clock_mhz(1e9) == spec.max_clock_mhz
    assert list(spec.clocks_mhz) == sorted(set(spec.clocks_mhz))


@ALL
def test_power_figures_are_in_order(spec: DeviceSpec) -> None:
    busy_floor_w = spec.constant_power_w + spec.static_power_w
    assert 0 < spec.idle_power_w < spec.power_limit_w
    assert busy_floor_w < spec.power_limit_w / 3


def test_the_documented_constants_are_those_of_the_code(repository: Path) -> None:
    text = (repository / "docs" / "simulation.md").read_text(encoding="utf-8")
    cells = r" ([^|]+) \|" * len(DEVICES)
    rows = re.findall(rf"^\| `(\w+)`[^|]*\|{cells}$", text, re.MULTILINE)
    assert len(rows) > 25
    for name, *documented in rows:
        for value, spec in zip(documented, DEVICES.values(), strict=True):
            energy = getattr(spec.energy, name, None)
            actual = getattr(spec, name) if energy is None else energy / PICO
            assert float(value) == pytest.approx(actual, rel=0.005), (name, spec.name)
