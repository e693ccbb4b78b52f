"""The NVML meter through the real module pynvml, on the stand-in library, in processes of its own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tvm_energy.errors import MeterUnavailable
from tvm_energy.meters.nvml import open_nvml_meter, throttle_names
from tvm_energy.meters.nvml_devices import GpuInfo, choose
from tvm_energy.meters.nvml_errors import explain

Run = Callable[..., Any]

OPEN = """
import json
from tvm_energy.errors import TvmEnergyError
from tvm_energy.meters.nvml import list_gpus, open_nvml_meter
try:
    meter = open_nvml_meter({arguments})
    print(json.dumps(meter.info.to_json()))
except TvmEnergyError as exc:
    print(json.dumps({{"error": type(exc).__name__, "text": str(exc)}}))
"""

MEASURE = """
import json
from nvml_standin.sleep_load import SleepLoad
from tvm_energy.errors import TvmEnergyError
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meters.nvml import open_nvml_meter
from tvm_energy.protocol import measure
plan = MeasurementPlan(warmup_s=0.1, window_s=0.3, budget_s={budget_s}, max_windows=3)
try:
    meter = open_nvml_meter({arguments})
    print(json.dumps(measure(SleepLoad(2e-3), meter, plan).to_json()))
except TvmEnergyError as exc:
    print(json.dumps({{"error": type(exc).__name__, "text": str(exc)}}))
"""


def opening(run: Run, knobs: str = "", arguments: str = "", **environment: str | None) -> Any:
    return run(OPEN.format(arguments=arguments), knobs, **environment)


def measuring(run: Run, knobs: str, arguments: str = "", budget_s: float = 3.0) -> Any:
    return run(MEASURE.format(arguments=arguments, budget_s=budget_s), knobs)


# ---- which sensor -------------------------------------------------------------------------------


def test_the_counter_comes_first(on_standin: Run) -> None:
    info = opening(on_standin, "name 0 NVIDIA H100 PCIe\ndriver 550.54.15\nlimit 350\nperiod 0.05")
    assert info["meter"] == "nvml"
    assert info["method"] == "counter"
    assert info["scope"] == "gpu"
    assert info["device_name"] == "NVIDIA H100 PCIe"
    assert info["device_uuid"] == "GPU-standin-0"
    assert info["driver_version"] == "550.54.15"
    assert info["max_power_w"] == 350
    assert info["resolution_j"] == 1e-3
    assert info["update_period_s"] == pytest.approx(0.05, rel=0.1)
    assert info["simulated"] is False
    assert info["notes"] == []


@pytest.mark.parametrize(
    ("knobs", "method", "scope", "note"),
    [
        ("fail GetTotalEnergyConsumption 3", "power_integral", "gpu", "field 186"),
        ("fail GetTotalEnergyConsumption 13", "power_integral", "gpu", "field 186"),
        ("counter_stuck 0", "power_integral", "gpu", "does not move"),
        (
            "fail GetTotalEnergyConsumption 3\nfield_error 186 0 3\nfield_scope 186 1",
            "power_integral",
            "module",
            "whole module",
        ),
        (
            "fail GetTotalEnergyConsumption 3\nfield_error 186 0 3\narchitecture 6",
            "power_integral",
            "gpu",
            "instantaneous",
        ),
        (
            "fail GetTotalEnergyConsumption 3\nfail GetFieldValues 3\narchitecture 7\npower -1 0 90\n"
            "name 0 NVIDIA A100-SXM4-40GB",
            "power_integral",
            "gpu",
            "instantaneous",
        ),
        (
            "fail GetTotalEnergyConsumption 3\nfield_error 186 0 3\narchitecture 8",
            "power_average",
            "gpu",
            "mean of the last second",
        ),
    ],
)
def test_what_is_taken_where_the_best_is_missing(
    on_standin: Run, knobs: str, method: str, scope: str, note: str
) -> None:
    info = opening(on_standin, knobs)
    assert (info["method"], info["scope"]) == (method, scope)
    assert any(note in text for text in info["notes"])


def test_updates_are_timed_once_in_a_process(on_standin: Run) -> None:
    """A worker opens the meter for each kernel."""
    code = """
    import json
    from tvm_energy.meters import nvml
    first = nvml.open_nvml_meter()
    first.close()
    nvml.watch_changes = None  # would be an error
    again = nvml.open_nvml_meter()
    try:
        nvml.open_nvml_meter(field="instant")
    except TypeError:
        print(json.dumps([first.info == again.info, again.read().energy_j > 0]))
    """
    assert on_standin(code, "power -1 0 180") == [True, True]


def test_the_scope_is_in_the_record(on_standin: Run) -> None:
    """On a Grace Hopper counter and power usage cover processor and GPU together."""
    info = opening(on_standin, "c2c 1\nname 0 NVIDIA GH200 480GB")
    assert (info["method"], info["scope"]) == ("counter", "module")
    assert any("whole module" in note for note in info["notes"])
    alone = opening(on_standin, "c2c 1", "scope='gpu'")
    assert (alone["method"], alone["scope"]) == ("power_integral", "gpu")
    assert opening(on_standin, "c2c 0")["scope"] == "gpu"


def test_the_memory_alone_is_measured_only_when_asked_for(on_standin: Run) -> None:
    assert opening(on_standin, "field_scope 186 2")["scope"] == "gpu"
    average = opening(on_standin, "field_scope 185 2", "scope='memory'")
    assert (average["method"], average["scope"]) == ("power_average", "memory")
    assert any("memory only" in note for note in average["notes"])
    refused = opening(on_standin, arguments="scope='memory'")
    assert refused["error"] == "MeterUnavailable"
    result = measuring(on_standin, "power -1 0 60\nfield_scope 186 2", "scope='memory'")
    assert (result["method"], result["scope"]) == ("power_integral", "memory")


def test_field_values_of_every_type(on_standin: Run) -> None:
    code = """
    import json, os
    from pathlib import Path
    from tvm_energy.meters.nvml import open_nvml_meter
    powers_w = []
    for value_type in range(6):
        Path(os.environ["NVML_STANDIN"]).write_text(f"power -1 0 222\\nfield_type {value_type}")
        meter = open_nvml_meter(field="instant")
        powers_w.append(meter.read().power_w)
        meter.close()  # the stand-in reads its knobs again
    print(json.dumps(powers_w))
    """
    assert on_standin(code) == [pytest.approx(222, abs=0.6)] * 6


def test_one_sensor_can_be_insisted_on(on_standin: Run) -> None:
    assert opening(on_standin, arguments="field='instant'")["method"] == "power_integral"
    refused = opening(on_standin, "fail GetTotalEnergyConsumption 3", "field='counter'")
    assert refused["error"] == "MeterUnavailable"
    assert "does not offer the sensor 'counter'" in refused["text"]


def test_no_sensor_at_all(on_standin: Run) -> None:
    knobs = (
        "fail GetTotalEnergyConsumption 3\nfail GetPowerUsage 3\nfail GetFieldValues 3\n"
        "name 0 GRID vGPU"
    )
    refused = opening(on_standin, knobs)
    assert refused["error"] == "MeterUnavailable"
    assert "GRID vGPU cannot be measured" in refused["text"]


def test_a_counter_that_disagrees_with_power_is_named(on_standin: Run) -> None:
    info = opening(on_standin, "gain 0.6\npower -1 0 100")
    assert info["method"] == "counter"
    assert any("disagree" in note for note in info["notes"])


# ---- which GPU ----------------------------------------------------------------------------------

TWO = "gpus 2\nuuid 0 GPU-aaaa-1\nuuid 1 GPU-bbbb-2\npower 0 0 60\npower 1 0 240\n"


CHOICES = [
    (None, None, "GPU-aaaa-1"),
    (None, 1, "GPU-bbbb-2"),
    (None, "GPU-bbbb-2", "GPU-bbbb-2"),
    (None, "gpu-bbbb", "GPU-bbbb-2"),
    ("1,0", None, "GPU-bbbb-2"),
    ("1", None, "GPU-bbbb-2"),
    ("GPU-bbbb-2,GPU-aaaa-1", None, "GPU-bbbb-2"),
    ("GPU-bb", None, "GPU-bbbb-2"),
    ("1,0", 0, "GPU-aaaa-1"),  # a number given by hand is NVML's
    ("1,0", "GPU-aaaa-1", "GPU-aaaa-1"),
]


def test_the_right_one_of_two_gpus(on_standin: Run) -> None:
    code = f"""
    import json, os
    from tvm_energy.meters.nvml import open_nvml_meter
    opened = []
    for visible, which, _ in {CHOICES!r}:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        meter = open_nvml_meter(which, field="instant")
        opened.append([meter.info.device_uuid, meter.read().power_w])
    print(json.dumps(opened))
    """
    # The watts tell that it is really that GPU's sensor.
    powers_w = {"GPU-aaaa-1": pytest.approx(60, abs=1), "GPU-bbbb-2": pytest.approx(240, abs=1)}
    opened = on_standin(code, TWO)
    assert opened == [[uuid, powers_w[uuid]] for _, _, uuid in CHOICES]


def gpu(index: int, uuid: str, name: str = "X") -> GpuInfo:
    return GpuInfo(index=index, uuid=uuid, name=name, driver_version="1", sensors=("s",))


GPUS = [gpu(0, "GPU-aaaa-1"), gpu(1, "GPU-aabb-2")]


@pytest.mark.parametrize(
    ("which", "visible", "text"),
    [
        (2, None, "there is no GPU 2; known are 0: GPU-aaaa-1"),
        (-1, None, "there is no GPU -1"),
        ("GPU-cc", None, "is not the UUID"),
        ("GPU-aa", None, "ambiguous"),
        ("", None, "ambiguous|not the UUID"),
        ("MIG-1234", None, "MIG instance"),
        (None, "", "hides every GPU"),
        (None, "-1", "hides every GPU"),
        (None, "7", "there is no GPU 7"),
        (None, "MIG-GPU-aaaa/1/0", "MIG instance"),
    ],
)
def test_choices_that_are_refused(which: Any, visible: str | None, text: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(MeterUnavailable, match=text):
        choose(GPUS, which, environ)


def test_no_gpu_at_all() -> None:
    with pytest.raises(MeterUnavailable, match="NVML knows no GPU"):
        choose([], None, {})


def test_numbers_are_doubtful_where_gpus_differ() -> None:
    different = [gpu(0, "GPU-a", "A100"), gpu(1, "GPU-b", "T4")]
    assert choose(GPUS, None, {})[1] == ()
    assert "PCI_BUS_ID" in choose(different, None, {})[1][0]
    assert choose(different, None, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[1] == ()


def test_mig_is_refused(on_standin: Run) -> None:
    refused = opening(on_standin, "mig 1")
    assert refused["error"] == "MeterUnavailable"
    assert "MIG is enabled" in refused["text"]
    assert opening(on_standin, "mig 0")["method"] == "counter"


def test_other_processes_are_named(on_standin: Run) -> None:
    info = opening(on_standin, "process 0 4242")
    assert any("4242" in note for note in info["notes"])


def test_the_list_of_gpus(on_standin: Run) -> None:
    code = """
    import dataclasses, json
    from tvm_energy.meters.nvml import list_gpus
    print(json.dumps([dataclasses.asdict(gpu) for gpu in list_gpus()]))
    """
    knobs = TWO + "gpus 3\nmig 0\nprocess 1 99\nlost 2 0\nlimit 300"
    first, second, lost = on_standin(code, knobs)
    assert first["sensors"][0] == "cumulative energy counter"
    assert first["power_limit_w"] == 300
    assert first["problem"] is None
    assert second["processes"] == [99]
    assert "fell off the bus" in lost["problem"]


# ---- errors -------------------------------------------------------------------------------------


INIT_FAILURES = {
    4: "no permission",
    9: "driver is not loaded",
    18: "different versions",
    27: "fabric manager",
    999: "unknown error",
    12345: "does not know",
}


def test_nvml_does_not_start(on_standin: Run) -> None:
    code = f"""
    import json, os
    from pathlib import Path
    from tvm_energy.errors import MeterUnavailable
    from tvm_energy.meters.nvml import open_nvml_meter
    texts = []
    for code in {list(INIT_FAILURES)}:
        Path(os.environ["NVML_STANDIN"]).write_text(f"fail InitWithFlags {{code}}")
        try:
            open_nvml_meter()
        except MeterUnavailable as exc:
            texts.append(str(exc))
    print(json.dumps(texts))
    """
    texts = on_standin(code)
    assert len(texts) == len(INIT_FAILURES)
    for (number, meaning), text in zip(INIT_FAILURES.items(), texts, strict=True):
        assert meaning in text
        assert f"NVML error {number}" in text


def test_no_library() -> None:
    # The machine that runs the tests may have a driver: a module that finds none stands for it.
    class NoLibraryError(Exception):
        value = 12

    def fail() -> None:
        raise NoLibraryError

    nvml = types.SimpleNamespace(NVMLError=NoLibraryError, nvmlInit=fail)
    with pytest.raises(MeterUnavailable, match=r"libnvidia-ml\.so\.1 was not found"):
        open_nvml_meter(nvml=nvml)


def test_no_permission_to_read(on_standin: Run) -> None:
    refused = opening(on_standin, "fail GetTotalEnergyConsumption 4")
    assert refused["error"] == "MeterUnavailable"
    assert "no permission" in refused["text"]


def test_every_known_error_has_a_next_step() -> None:
    for code in (
        1,
        2,
        3,
        4,
        6,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        16,
        17,
        18,
        19,
        20,
        21,
        23,
        25,
        27,
        28,
    ):
        assert len(explain(code)) > 25
        assert "does not know" not in explain(code)


def test_the_wrong_pynvml_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    impostor = types.ModuleType("pynvml")
    impostor.NVMLError = Exception  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", impostor)
    with pytest.raises(MeterUnavailable, match=r"pip uninstall -y .* nvidia-ml-py") as caught:
        open_nvml_meter()
    assert "NVML_FI_DEV_POWER_INSTANT" in str(caught.value)


def test_a_missing_pynvml_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeterUnavailable, match="cannot be imported"):
        open_nvml_meter()


def test_an_unknown_field_is_misuse() -> None:
    with pytest.raises(ValueError, match="field must be one of"):
        open_nvml_meter(field="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scope must be one of"):
        open_nvml_meter(scope="rack")  # type: ignore[arg-type]


def test_throttle_reasons_have_names() -> None:
    assert throttle_names(0) == ()
    assert throttle_names(0x4 | 0x20) == ("sw_power_cap", "sw_thermal_slowdown")
    assert throttle_names(0x8000 | 0x1) == ("gpu_idle", "unknown_0x8000")


# ---- measuring in real time ---------------------------------------------------------------------


@pytest.mark.parametrize("field", ["counter", "instant"])
def test_a_known_power_is_measured(on_standin: Run, field: str) -> None:
    knobs = "power -1 0 180\nthrottle 4\nclock 1335\ntemperature 61"
    result = measuring(on_standin, knobs, f"field={field!r}")
    assert result.get("error") is None, result
    assert result["energy_j"] / result["latency_s"] == pytest.approx(180, rel=0.02)
    assert result["latency_s"] == pytest.approx(2e-3, rel=0.3)  # a busy machine sleeps longer
    assert result["stderr_j"] > 0
    assert result["clock_mhz"] == 1335
    assert result["temperature_c"] == 61
    assert result["throttle_reasons"] == ["sw_power_cap"]
    assert result["sensor_updates"] > 10


def test_a_reset_of_the_counter_costs_one_window(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\ncounter_reset 0.7")
    assert "reset" in result["quality"]
    assert result["energy_j"] / result["latency_s"] == pytest.approx(180, rel=0.03)


def test_a_stuck_counter(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\ncounter_stuck 0.6")
    assert result["error"] == "MeasurementError"
    assert "stuck" in result["text"]


def test_a_counter_far_above_the_limit(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\ngain 5")
    assert result["error"] == "MeasurementError"
    assert "not plausible" in result["text"]


def test_a_gpu_lost_while_measuring(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\nlost 0 0.6")
    assert result["error"] == "MeterUnavailable"
    assert "fell off the bus" in result["text"]


def test_a_passing_error_costs_one_kernel(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\nfail_after GetTotalEnergyConsumption 0.6 10")
    assert result["error"] == "MeasurementError"
    assert "timed out" in result["text"]


def test_a_period_longer_than_the_budget(on_standin: Run) -> None:
    result = measuring(on_standin, "power -1 0 180\nperiod 0.4", budget_s=0.25)
    assert result["error"] == "MeasurementTooShort"


def test_queries_that_are_not_supported_leave_gaps(on_standin: Run) -> None:
    code = """
    import dataclasses, json
    from tvm_energy.meters.nvml import open_nvml_meter
    meter = open_nvml_meter()
    print(json.dumps([dataclasses.asdict(meter.state()), meter.info.max_power_w]))
    """
    knobs = (
        "fail GetClockInfo 3\nfail GetTemperature 3\nfail GetCurrentClocksEventReasons 13\n"
        "fail GetEnforcedPowerLimit 3\nthrottle 32"
    )
    state, limit_w = on_standin(code, knobs)
    assert state["clock_mhz"] is None
    assert state["temperature_c"] is None
    assert state["throttle_reasons"] == ["sw_thermal_slowdown"]  # through the older name
    assert limit_w is None
