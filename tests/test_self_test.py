from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from virtual_gpu import TRUE_SENSOR, VirtualGpu

from tvm_energy.doctor import run_self_test, self_test_findings
from tvm_energy.errors import ConfigurationError, MeterUnavailable
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.records import Header, from_json, to_json
from tvm_energy.self_test import (
    SelfTest,
    SensorTest,
    decide,
    forget_self_test,
    load_self_test,
    open_sensors,
    save_self_test,
    self_test,
)
from tvm_energy.simulation.nvml import ADA_SENSOR, VOLTA_SENSOR, SensorSpec


class Distorted:
    """A simulated NVML whose counter runs wrong from the first call on."""

    def __init__(self, gpu: VirtualGpu, gain: float) -> None:
        self._nvml = gpu.nvml
        self._gain = gain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return round(self._gain * self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def compared(sensor: SensorSpec = TRUE_SENSOR, gain: float = 1.0, load: bool = True) -> SelfTest:
    gpu = VirtualGpu(sensor)
    nvml = Distorted(gpu, gain)
    return self_test(
        open_sensors(lambda field: open_nvml_meter(nvml=nvml, field=field)),
        gpu.load(1e-3, 220.0) if load else None,
        load_name="a kernel of 220 W",
    )


def test_sensors_that_agree() -> None:
    result = compared()
    assert (result.field, result.agree, result.load) == ("counter", True, "a kernel of 220 W")
    for sensor in result.sensors:
        assert sensor.update_period_s == pytest.approx(0.1, rel=0.05)
        assert sensor.idle_w == pytest.approx(50, abs=1)
        assert sensor.load_w == pytest.approx(220, rel=0.02)
        assert sensor.problem == ""


def test_the_average_has_forgotten_the_idle_time() -> None:
    sensor = dataclasses.replace(ADA_SENSOR, gain=1.0, offset_w=0.0)
    (usage,) = [item for item in compared(sensor).sensors if item.field == "usage"]
    assert usage.method == "power_average"
    assert usage.load_w == pytest.approx(220, rel=0.02)


def test_a_counter_against_two_others_is_not_used() -> None:
    result = compared(gain=0.6)
    assert (result.field, result.agree) == ("instant", False)
    assert "counter says" in result.verdict
    warnings = [item for item in self_test_findings(result) if item.severity == "warning"]
    assert len(warnings) == 1
    assert warnings[0].remedy


def test_a_counter_that_stands_still_is_not_used() -> None:
    result = compared(gain=0.0)
    assert result.field == "instant"
    assert result.agree is None
    assert "does not move" in result.verdict


def test_a_counter_beyond_all_bounds_is_not_used() -> None:
    result = compared(gain=5.0)
    assert result.field == "instant"
    assert "not plausible" in result.verdict


def test_old_cards_have_no_instant_power() -> None:
    sensor = dataclasses.replace(VOLTA_SENSOR, gain=1.0)
    result = compared(sensor)
    assert (result.field, result.agree) == ("counter", None)
    assert result.sensors[0].update_period_s == pytest.approx(0.02, rel=0.1)
    assert result.sensors[1].problem


def test_without_a_load_idle_power_is_compared() -> None:
    result = compared(load=False)
    assert (result.field, result.agree, result.load) == ("counter", True, "")
    assert all(sensor.load_w is None for sensor in result.sensors)
    assert compared(gain=0.6, load=False).field == "instant"
    assert any("at idle only" in item.text for item in self_test_findings(result))


def test_a_sensor_that_does_not_see_the_load() -> None:
    gpu = VirtualGpu()
    other = VirtualGpu()
    other.clock = gpu.clock
    result = self_test(
        open_sensors(lambda field: open_nvml_meter(nvml=gpu.nvml, field=field)),
        other.load(1e-3, 220.0),
    )
    assert result.field is None
    assert "does not see the load" in result.verdict
    assert [item.severity for item in self_test_findings(result)][-1] == "error"


def sensor(field: str, idle_w: float, load_w: float, problem: str = "") -> SensorTest:
    return SensorTest(
        field=field,  # type: ignore[arg-type]
        method="m",
        scope="gpu",
        idle_w=idle_w,
        load_w=load_w,
        problem=problem,
    )


@pytest.mark.parametrize(
    ("usage", "field"),
    [((30, 200), "counter"), ((60, 290), "instant"), (None, "instant")],
)
def test_the_third_sensor_decides(usage: tuple[float, float] | None, field: str) -> None:
    sensors = [sensor("counter", 30, 200), sensor("instant", 60, 300)]
    if usage:
        sensors.append(sensor("usage", *usage))
    assert decide(sensors)[:2] == (field, False)


def test_sensors_of_different_scope_are_not_compared() -> None:
    counter = dataclasses.replace(sensor("counter", 90, 500), scope="module")  # Grace Hopper
    field, agree, verdict = decide([counter, sensor("instant", 60, 300)])
    assert (field, agree) == ("counter", None)
    assert "different parts" in verdict


def test_nothing_to_test() -> None:
    with pytest.raises(MeterUnavailable, match="no sensor answers"):
        self_test({"counter": "not there"}, None)


def test_kept_results_are_found_again(tmp_path: Path) -> None:
    result = dataclasses.replace(compared(), simulated=False)
    path = save_self_test(result, tmp_path)
    assert path is not None
    assert load_self_test(result.device_uuid, result.driver_version, tmp_path) == result
    assert load_self_test(result.device_uuid, "another driver", tmp_path) is None
    assert load_self_test("GPU-other", result.driver_version, tmp_path) is None
    forget_self_test("GPU-other", tmp_path)
    assert path.exists()
    for text in ("", "[]", "{}", '{"field": "magic"}', "[" * 100_000):
        path.write_text(text)
        assert load_self_test(result.device_uuid, result.driver_version, tmp_path) is None
    forget_self_test(result.device_uuid, tmp_path)
    assert not path.exists()


def test_a_simulated_result_is_not_kept(tmp_path: Path) -> None:
    assert save_self_test(compared(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_result_fits_into_the_header_of_a_log() -> None:
    result = compared()
    header = Header(
        device={},
        meter={"meter": "nvml", "self_test": result.to_json()},
        objective="energy",
        policy="all",
        plan={},
        versions={},
        seed=0,
        created=1.0,
    )
    read = from_json(to_json(header))
    assert isinstance(read, Header)
    assert read.meter is not None
    assert SelfTest.from_json(read.meter["self_test"]) == result


@pytest.mark.parametrize("name", ["a100", "rtx4090", "h200"])
def test_simulated_devices(name: str) -> None:
    result = run_self_test(f"sim:{name}", seconds=2.0)
    assert result.simulated
    assert result.field == "counter"
    assert result.true_load_w is not None
    (counter,) = [item for item in result.sensors if item.field == "counter"]
    assert counter.load_w == pytest.approx(result.true_load_w, rel=0.06)  # their gain error


def test_a_simulated_device_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError):
        run_self_test("sim:nothing")
