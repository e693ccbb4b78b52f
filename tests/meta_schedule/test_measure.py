"""Kernels without tuning: default schedules, and libraries that somebody exported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvm_energy.cli import main
from tvm_energy.errors import ConfigurationError, MeasurementError
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule import compat  # noqa: F401  (before TVM)
from tvm_energy.meta_schedule.default_schedule import (
    build_default,
    check_library,
    measure_artifact,
    parse_argument,
)
from tvm_energy.meta_schedule.device import RealDevice, open_device
from tvm_energy.meta_schedule.simulated import SimulatedTuningDevice
from tvm_energy.meta_schedule.workloads import parse_workload

# isort: split
import tvm
from tvm import relax

PLAN = MeasurementPlan(window_s=0.3)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of one packed function ``mm``, and a Relax executable."""
    folder = tmp_path_factory.mktemp("libraries")
    function = parse_workload("matmul:m=32,n=32,k=32").primfunc().with_attr("global_symbol", "mm")
    module = tvm.compile(tvm.IRModule({"mm": function}), target="llvm")
    module.export_library(str(folder / "packed.so"))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    w = relax.Var("w", relax.TensorType((64, 32), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, w))
            output = builder.emit_output(builder.emit(relax.op.nn.relu(product)))
        builder.emit_func_output(output)
    network = relax.get_pipeline("zero")(builder.get())
    tvm.compile(network, target="llvm").export_library(str(folder / "relax.so"))
    return folder


@pytest.fixture(scope="module")
def cpu() -> Iterator[RealDevice]:
    device = open_device("cpu")
    assert isinstance(device, RealDevice)
    yield device
    device.close()


@pytest.fixture(scope="module")
def simulated() -> Iterator[SimulatedTuningDevice]:
    device = SimulatedTuningDevice("sim:a100")
    yield device
    device.close()


@pytest.mark.parametrize(
    ("spec", "schedule"),
    [
        ("matmul:m=256,n=256,k=256", "dlight"),
        ("conv2d", "dlight"),
        (
            "matvec",
            "dlight fallback",
        ),  # DLight's own rule asks for more shared memory than there is
    ],
)
def test_a_workload_on_a_simulated_gpu(
    simulated: SimulatedTuningDevice, spec: str, schedule: str
) -> None:
    kernel = build_default(parse_workload(spec), simulated)
    assert kernel.schedule == schedule
    result = measure_artifact(kernel.artifact, simulated, PLAN)
    assert result.simulated
    assert 0 < result.stderr_j < 0.02 * result.energy_j


def test_a_workload_on_the_processor(cpu: RealDevice) -> None:
    kernel = build_default(parse_workload("matmul:m=64,n=64,k=64"), cpu)
    assert 0 < cpu.latency(kernel.artifact) < 0.1


TENSOR = ((32, 32), "float32")
CALLS = {
    "packed.so": ("mm", [TENSOR, TENSOR, TENSOR]),
    "relax.so": ("main", [((4, 64), "float32"), ((64, 32), "float32")]),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_compiled_libraries_on_the_processor(cpu: RealDevice, libraries: Path, name: str) -> None:
    result = cpu.measure_exported(str(libraries / name), *CALLS[name], PLAN)
    # Whether there is energy depends on the machine.
    latency_s = result.latency_s if isinstance(result, EnergyMeasurement) else result
    assert 0 < latency_s < 0.1


@pytest.mark.parametrize(
    ("name", "entry", "arguments", "text"),
    [
        (
            "relax.so",
            "main",
            CALLS["relax.so"][1][:1],
            r"takes 2 argument\(s\) \(x, w\), but 1 were",
        ),
        ("relax.so", "main", [((4, 64), "float32"), TENSOR], "cannot be run with these arguments"),
        ("relax.so", "other", [], "has no function 'other'"),
        ("packed.so", "other", [], "has no function 'other'"),
        ("packed.so", "mm", [TENSOR], "Expected 3 arguments"),
    ],
)
def test_wrong_calls_of_a_library(
    cpu: RealDevice, libraries: Path, name: str, entry: str, arguments: list, text: str
) -> None:
    with pytest.raises(MeasurementError, match=text) as caught:
        cpu.measure_exported(str(libraries / name), entry, arguments, PLAN)
    assert "\n" not in str(caught.value)
    assert "tvm_energy." not in str(caught.value)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tvm-energy", "measure", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    code, out, _ = run("-w", "matmul:m=256,n=256,k=256", "-d", "sim:a100", "-o", output)
    assert code == 0
    assert out.startswith("SIMULATED DEVICE sim:a100")
    assert "a launch (gross)" in out
    assert "net of" in out
    values = json.loads(output.read_text())
    assert values["energy_j"] == pytest.approx(values["mean_power_w"] * values["latency_s"])
    net_j = values["energy_j"] - values["idle_power_w"] * values["latency_s"]
    assert values["net_energy_j"] == pytest.approx(net_j)
    library = tmp_path / "x.so"
    library.write_bytes(b"\x7fELF")
    code, out, err = run("--library", library, "-d", "sim:a100")
    assert (code, out) == (2, "")
    assert "simulated and cannot run a compiled library" in err


def test_arguments_are_parsed() -> None:
    assert parse_argument("1,3,224,224:float16") == ((1, 3, 224, 224), "float16")
    assert parse_argument("32x16") == ((32, 16), "float32")
    assert parse_argument("8:bfloat16") == ((8,), "bfloat16")
    for text in ("", "a", "1,0", "1,-2", "4:floaty", "4:", "4:object", "4:str"):
        if text == "4:":
            assert parse_argument(text) == ((4,), "float32")
            continue
        with pytest.raises(ConfigurationError, match="--arg"):
            parse_argument(text)


def test_files_that_are_no_libraries(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        check_library(tmp_path / "missing.so")
    (tmp_path / "text.so").write_text("x")
    with pytest.raises(ConfigurationError, match="not a shared library"):
        check_library(tmp_path / "text.so")
