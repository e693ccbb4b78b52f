"""A network and a log become a library that computes what ONNX Runtime does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_networks import run_onnxruntime, saved, small_model
from typer.testing import CliRunner

from tvm_energy.cli import app
from tvm_energy.errors import ConfigurationError, MeterUnavailable
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meta_schedule.compiling import (
    compare_outputs,
    compile_from_log,
    load_library,
    measure_network,
    write_library,
)
from tvm_energy.meta_schedule.networks import extract_tasks, import_onnx
from tvm_energy.meta_schedule.tuning import TuningTask, run
from tvm_energy.meters.base import DeviceState, MeterInfo, Reading
from tvm_energy.meters.system_time import SystemTime

# isort: split
import tvm

pytestmark = pytest.mark.tuning


def tuned(folder: Path, device: str, target, names: set[str]) -> Path:
    """A log of some kernels of the small network."""
    network = import_onnx(small_model(), name="small")
    run(
        [
            TuningTask(name=task.name, mod=task.mod, weight=task.weight)
            for task in extract_tasks(network, tvm.target.Target(target))
            if task.name in names
        ],
        device=device,
        target=tvm.target.Target(target),
        work_dir=folder,
        trials=4 * len(names),
        trials_per_round=4,
        objective="latency" if device == "cpu" else "energy:slack=0.05",
        seed=1,
        population=16,
    )
    return folder


@pytest.fixture(scope="module")
def cpu_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = {"kind": "llvm", "num-cores": 2}
    return tuned(tmp_path_factory.mktemp("cpu"), "cpu", target, {"softmax", "fused_matmul_add1"})


@pytest.fixture(scope="module")
def sim_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("sim"), "sim:a100", "nvidia/nvidia-a100", {"softmax"})


def test_the_library_computes_what_onnx_runtime_does(cpu_log: Path, tmp_path: Path) -> None:
    network = import_onnx(small_model(), name="small")
    compiled = compile_from_log(network, cpu_log)
    origin = {kernel.name: (kernel.origin, kernel.reason) for kernel in compiled.kernels}
    assert origin["softmax"] == origin["fused_matmul_add1"] == ("log", None)
    assert origin["max_pool2d"] == ("as written", "the log has no such kernel")
    promise = compiled.promise
    assert promise is not None
    assert not promise.complete
    assert promise.latency_s == pytest.approx(
        sum(item["latency_s"] for item in compiled.manifest["kernels"])
    )
    library = tmp_path / "model.so"
    write_library(compiled, library)
    assert [item.name for item in tmp_path.iterdir()] == ["model.so"]
    loaded = load_library(compiled, library)
    inputs = network.random_inputs(seed=5)
    verdict = compare_outputs(
        loaded.run(inputs), run_onnxruntime(small_model(), inputs), "ONNX Runtime"
    )
    assert verdict.ok
    assert not verdict.constant
    other = run_onnxruntime(small_model(seed=1), inputs)
    assert not compare_outputs(loaded.run(inputs), other, "ONNX Runtime").ok


def test_the_command_prints_the_table_and_verifies(cpu_log: Path, tmp_path: Path) -> None:
    model, library = saved(small_model(), tmp_path), tmp_path / "model.so"
    arguments = ["compile", str(model), "--log", str(cpu_log), "-o", str(library), "--verify"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["verdict"]["ok"] is True
    assert values["verdict"]["largest_error"] < 1e-5
    assert {kernel["origin"] for kernel in values["kernels"]} == {"log", "as written"}
    assert (values["measured"] is None) == bool(values["not_measured"])


def test_a_gpu_library_is_made_without_a_gpu_and_every_kernel_is_scheduled(
    sim_log: Path, tmp_path: Path
) -> None:
    model, library = saved(small_model(), tmp_path), tmp_path / "gpu.so"
    done = CliRunner().invoke(
        app,
        ["compile", str(model), "--log", str(sim_log), "-o", str(library), "--verify", "--json"],
    )
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["simulated"] is True
    assert values["holds_cuda_source"] == (b"softmax_kernel(float*" in library.read_bytes())
    by_name = {kernel["name"]: kernel["origin"] for kernel in values["kernels"]}
    assert by_name.pop("softmax") == "log"
    assert set(by_name.values()) == {"default GPU schedule"}
    if not tvm.cuda().exist:
        assert values["verdict"] is None
        assert values["not_verified"] == "there is no cuda device here"


def test_a_log_of_another_kind_of_device_is_refused(sim_log: Path, tmp_path: Path) -> None:
    network = import_onnx(small_model(), name="small")
    with pytest.raises(ConfigurationError, match="tuned for cuda, and its schedules do not fit"):
        compile_from_log(network, sim_log, "llvm")
    with pytest.raises(ConfigurationError, match="is not a TVM target"):
        compile_from_log(network, sim_log, "quantum")


def test_library_paths_that_cannot_be(cpu_log: Path, tmp_path: Path) -> None:
    compiled = compile_from_log(import_onnx(small_model(), name="small"), cpu_log)
    for path in (tmp_path, tmp_path / "no" / "model.so"):
        with pytest.raises(ConfigurationError, match="cannot write"):
            write_library(compiled, path)


class SteadyMeter:
    """A counter that rises by a constant power in real time, once a millisecond."""

    def __init__(self, power_w: float) -> None:
        self.power_w = power_w
        self.time = SystemTime()
        self.info = MeterInfo(
            meter="steady",
            method="counter",
            scope="package",
            device_name="this machine",
            device_uuid="cpu:here",
            update_period_s=1e-3,
            resolution_j=1e-6,
        )

    def read(self) -> Reading:
        now_s = self.time.now()
        return Reading(time_s=now_s, energy_j=self.power_w * int(now_s * 1e3) / 1e3)

    def state(self) -> DeviceState:
        return DeviceState()

    def close(self) -> None:
        pass


def test_the_whole_network_is_measured_under_a_meter(cpu_log: Path, tmp_path: Path) -> None:
    compiled = compile_from_log(import_onnx(small_model(), name="small"), cpu_log)
    library = tmp_path / "model.so"
    write_library(compiled, library)
    plan = MeasurementPlan(warmup_s=0.1, window_s=0.3, budget_s=5.0, target_relative_stderr=0.1)
    measured = measure_network(load_library(compiled, library), SteadyMeter(40.0), plan)
    assert measured.windows >= 2
    # Not exactly 40 W: when other programs slow some windows down, the mean of joules a launch over
    # the windows and the mean time differ.
    assert 20 < measured.power_w < 120
    # Time is that of the device; what it waited for the host is told apart. On a busy machine clocks of
    # host and device may disagree in a window.
    busy_s = measured.launches * measured.latency_s
    assert busy_s == pytest.approx((1 - (measured.idle_share or 0)) * measured.window_s, rel=0.05)


def test_outputs_are_compared_value_by_value() -> None:
    right = [np.linspace(-1, 1, 50, dtype=np.float32)]
    assert compare_outputs(right, right, "x").ok
    assert compare_outputs([right[0] * (1 + 5e-4)], right, "x").ok
    assert not compare_outputs([right[0] * 1.01], right, "x").ok
    assert not compare_outputs([right[0] * np.nan], right, "x").ok
    assert not compare_outputs([right[0][:10]], right, "x").ok
    assert not compare_outputs([], right, "x").ok
    constant = compare_outputs([np.full(9, 0.001)], [np.full(9, 0.001)], "x")
    assert constant.ok
    assert constant.constant


def test_without_a_meter_the_reason_is_told(cpu_log: Path, tmp_path: Path, monkeypatch) -> None:
    from tvm_energy.meters import rapl

    def no_meter(**_: object) -> None:
        raise MeterUnavailable("there is no counter")

    monkeypatch.setattr(rapl, "open_rapl_meter", no_meter)
    model, library = saved(small_model(), tmp_path), tmp_path / "model.so"
    done = CliRunner().invoke(
        app, ["compile", str(model), "--log", str(cpu_log), "-o", str(library), "--verify"]
    )
    assert done.exit_code == 0, done.output
    assert "Not measured: there is no counter" in done.stdout
    assert "agrees with ONNX Runtime" in done.stdout
