"""Faults that users of energy tools reported, played back (docs/faults.md lists them all)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_nvml_meter import measuring, opening
from virtual_gpu import TRUE_SENSOR, ScriptedMeter, VirtualGpu, VirtualLoad

from tvm_energy.errors import MeasurementError, MeterUnavailable
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.protocol import measure, measure_idle_power
from tvm_energy.simulation.nvml import ADA_SENSOR, SimulatedNvml

Run = Callable[..., Any]
ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = MeasurementPlan()
LATENCY_S, POWER_W = 37e-6, 211.0


def test_the_update_period_is_measured_and_not_assumed(on_standin: Run) -> None:
    code = """
    import json, os
    from pathlib import Path
    from tvm_energy.meters.nvml import open_nvml_meter
    periods_s = []
    for period_s in (0.01, 0.05, 0.1):
        knobs = f"power -1 0 180\\nperiod {period_s}\\nuuid 0 GPU-{period_s}"
        Path(os.environ["NVML_STANDIN"]).write_text(knobs)
        meter = open_nvml_meter()
        periods_s.append(meter.info.update_period_s)
        meter.close()  # the stand-in reads its knobs again
    print(json.dumps(periods_s))
    """
    assert on_standin(code) == [pytest.approx(period_s, rel=0.15) for period_s in (0.01, 0.05, 0.1)]


def test_zero_watts_are_no_reading(on_standin: Run) -> None:
    """Drivers around 581 to 595 give 0 W after sleep."""
    result = measuring(on_standin, "power -1 0 0\nnoise 0")
    assert result["error"] == "MeasurementError"
    assert "0 W is not plausible" in result["text"]


def test_values_that_repeat_are_no_updates(on_standin: Run) -> None:
    """However often it is asked, a sensor that moves every 50 ms gives 20 updates a second."""
    result = measuring(on_standin, "power -1 0 180\nperiod 0.05", budget_s=4.0)
    assert result["sensor_updates"] == pytest.approx(result["window_s"] / 0.05, abs=2)


def test_every_power_query_is_unsupported(on_standin: Run) -> None:
    """A Jetson: NVML starts and lists one GPU, which answers nothing."""
    knobs = (
        "name 0 Orin (nvgpu)\nfail GetTotalEnergyConsumption 3\nfail GetPowerUsage 3\n"
        "fail GetFieldValues 3\nfail GetEnforcedPowerLimit 3"
    )
    refused = opening(on_standin, knobs)
    assert refused["error"] == "MeterUnavailable"
    assert "Orin (nvgpu) cannot be measured" in refused["text"]
    assert "tvm-energy[zeus]" in refused["text"]


class Recording:
    """Passes everything on to a simulated NVML and remembers what was called."""

    def __init__(self, nvml: SimulatedNvml) -> None:
        self._nvml = nvml
        self.called: list[tuple[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if not name.startswith("nvml"):
            return value

        def call(*arguments: Any) -> Any:
            self.called.append((name, self._nvml.clock.now()))
            return value(*arguments)

        return call


def test_nothing_is_set_and_supported_clocks_are_not_listed() -> None:
    """Listing them hangs machines with an RTX 5070 Ti; locks outlive the process."""
    gpu = VirtualGpu()
    recording = Recording(gpu.nvml)
    meter = open_nvml_meter(nvml=recording)
    measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    meter.close()
    names = {name for name, _ in recording.called}
    assert "nvmlDeviceGetTotalEnergyConsumption" in names
    assert not [name for name in names if re.search(r"Set|Reset|Supported|Limit(?!$)", name)]


def test_a_binding_that_does_not_fit_the_driver_leaves_gaps() -> None:
    """A struct of another version: nvidia-ml-py raises an error that is no NVMLError."""

    class NVMLLibraryMismatchError(Exception):
        pass

    def mismatch(*_: Any) -> Any:
        raise NVMLLibraryMismatchError("Library version mismatch")

    gpu = VirtualGpu()
    nvml: Any = gpu.nvml
    nvml.NVMLLibraryMismatchError = NVMLLibraryMismatchError
    nvml.nvmlDeviceGetComputeRunningProcesses = nvml.nvmlDeviceGetC2cModeInfoV = mismatch
    nvml.nvmlDeviceGetClockInfo = mismatch
    result = measure(gpu.load(LATENCY_S, POWER_W), open_nvml_meter(nvml=nvml), PLAN)
    assert result.energy_j == pytest.approx(LATENCY_S * POWER_W, rel=0.01)
    assert result.clock_mhz is None
    assert result.temperature_c == 51


@pytest.mark.parametrize("field", ["counter", "instant"])
def test_the_sensor_is_not_polled_without_need(field: Any) -> None:
    """Fast polling costs power and gives nothing: few readings but around the edges of a window."""
    gpu = VirtualGpu()
    recording = Recording(gpu.nvml)
    meter = open_nvml_meter(nvml=recording, field=field)
    recording.called.clear()
    result = measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)
    assert len(recording.called) / result.device_s < 500


def test_a_field_that_fails_while_the_call_succeeds() -> None:
    """Each field value carries a return code of its own."""

    class Failing(SimulatedNvml):
        code = 0

        def nvmlDeviceGetFieldValues(self, handle: str, fields: list[Any]) -> list[Any]:
            if self.clock.now() < 2.0:
                return super().nvmlDeviceGetFieldValues(handle, fields)
            return [SimpleNamespace(nvmlReturn=self.code, valueType=1, value=None)]

    for code, error, text in ((21, MeasurementError, "no data now"), (15, MeterUnavailable, "bus")):
        gpu = VirtualGpu()
        gpu.nvml.__class__ = Failing
        Failing.code = code
        meter = open_nvml_meter(nvml=gpu.nvml, field="instant")
        with pytest.raises(error, match=text):
            measure(gpu.load(LATENCY_S, POWER_W), meter, PLAN)


def test_idle_power_is_taken_when_the_card_has_come_down() -> None:
    """A card that stays at 50 W for seconds after a kernel before it falls to 25 W."""
    gpu = VirtualGpu(idle_power_w=25.0)
    gpu.timeline.append(0.0, 1.0, 200.0)
    for tenth in range(60):
        gpu.timeline.append(gpu.timeline.end_s, 0.1, 25 + 25 * math.exp(-tenth / 15))
    gpu.clock.advance_to(1.0)
    meter = open_nvml_meter(nvml=gpu.nvml)
    assert measure_idle_power(meter, 1.0) == pytest.approx(25.0, rel=0.04)


def test_power_is_the_mean_and_not_the_last_sample() -> None:
    """A kernel that ends each second with 0.3 s of low power."""
    gpu = VirtualGpu()
    meter = ScriptedMeter(
        gpu.clock,
        energy_j=lambda t: gpu.timeline.cumulative_j(math.floor(t * 50) / 50),
        update_period_s=0.02,
    )
    load = VirtualLoad(gpu, 1e-3, lambda t: 250.0 if t % 1.0 < 0.7 else 80.0)
    plan = dataclasses.replace(PLAN, window_s=1.0, budget_s=20.0)
    assert measure(load, meter, plan).power_w == pytest.approx(0.7 * 250 + 0.3 * 80, rel=0.04)


def test_a_mean_of_the_last_second_is_not_mixed_with_the_kernel_before() -> None:
    gpu = VirtualGpu(dataclasses.replace(ADA_SENSOR, gain=1.0, offset_w=0.0))
    meter = open_nvml_meter(nvml=gpu.nvml, field="usage")
    assert meter.info.method == "power_average"
    hungry = gpu.load(1e-3, 380.0)
    hungry.enqueue(2000)
    hungry.synchronize()
    assert meter.read().power_w == pytest.approx(380.0, rel=0.01)
    result = measure(gpu.load(LATENCY_S, 90.0), meter, PLAN)
    assert result.power_w == pytest.approx(90.0, rel=0.01)
    assert any("mean of the last second" in note for note in meter.info.notes)


def test_a_card_that_throttles_is_named(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\nthrottle 64\nclock 810\ntemperature 92")
    assert result["throttle_reasons"] == ["hw_thermal_slowdown"]
    assert "throttled" in result["quality"]
    assert (result["clock_before_mhz"], result["clock_after_mhz"]) == (810, 810)
    assert (result["temperature_before_c"], result["temperature_c"]) == (92, 92)


def test_noise_widens_the_error_bar_instead_of_hiding() -> None:
    """Two kernels 1 % apart on a noisy card: called equal, not ranked by chance."""
    sensor = dataclasses.replace(TRUE_SENSOR, noise_w=25.0)
    wrong = 0
    for seed in range(20):
        gpu = VirtualGpu(sensor, seed=seed)
        meter = open_nvml_meter(nvml=gpu.nvml)
        plan = dataclasses.replace(PLAN, seed=seed, budget_s=2.0)
        first = measure(gpu.load(LATENCY_S, POWER_W), meter, plan)
        second = measure(gpu.load(LATENCY_S, 1.01 * POWER_W), meter, plan)
        wrong += first.interval_j[0] > second.interval_j[1]
        assert first.relative_stderr > 0.005
    assert wrong == 0


def test_the_table_of_faults_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", table)
    assert len(named) >= 30
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| fault |"))]
    assert len(rows) > 25
    for row in rows:
        assert "::" in row or "not here" in row, f"no test beside: {row}"
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path} has no {name}"
