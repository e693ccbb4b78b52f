"""Tuning for real: on this CPU through llvm, and on a simulated GPU."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from statistics import fmean

import cloudpickle
import numpy as np
import pytest
from wall_meter import BASE_W, FACTOR, WallMeter

import tvm_energy
from tvm_energy.errors import ConfigurationError, MeterUnavailable, WorkDirError
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.meta_schedule.device import open_device
from tvm_energy.meta_schedule.logs import close_loggers
from tvm_energy.meta_schedule.search import ReservoirSearch
from tvm_energy.meta_schedule.tuning import (
    TuningTask,
    evolutionary_search,
    normalized,
    run,
)
from tvm_energy.meta_schedule.workloads import parse_workload
from tvm_energy.records import FILE_NAME, CandidateRecord, FinalRecord, read_records
from tvm_energy.replay import summarize

# isort: split
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

# Workers cannot import these modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["wall_meter"])

pytestmark = pytest.mark.tuning

LLVM = {"kind": "llvm", "num-cores": 2}
SMALL = "matmul:m=128,n=128,k=128"


def records_of(work_dir: Path) -> list:
    return list(read_records(work_dir / FILE_NAME))


def candidates_of(work_dir: Path) -> list[CandidateRecord]:
    return [record for record in records_of(work_dir) if isinstance(record, CandidateRecord)]


@pytest.mark.parametrize(
    "spec",
    [
        "matmul:m=48,n=40,k=56",
        "matvec:m=96,k=80",
        "conv2d:ci=8,co=16,h=14,w=14,kernel=3",
    ],
)
def test_kernels_tuned_for_this_cpu_equal_numpy(spec: str, tmp_path: Path) -> None:
    workload = parse_workload(spec)
    function = workload.primfunc()
    database = tvm_energy.tune_tir(
        function,
        LLVM,
        tmp_path,
        8,
        num_trials_per_iter=4,
        seed=1,
        objective="latency",
        strategy=evolutionary_search(32),
    )
    schedule = ms.tir_integration.compile_tir(database, function, tvm.target.Target(LLVM))
    assert schedule is not None
    assert schedule.trace is not None
    kernel = tvm.compile(schedule.mod, target=tvm.target.Target(LLVM))
    inputs = workload.random_inputs(seed=3)
    expected = workload.reference(inputs)[0]
    output = tvm.runtime.tensor(np.zeros_like(expected))
    kernel(*(tvm.runtime.tensor(array) for array in inputs), output)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-4, atol=1e-4)
    # Stock TVM reads what was written, and finds the same number of valid kernels.
    stock = ms.database.JSONDatabase(work_dir=str(tmp_path))
    valid = [r for r in stock.get_all_tuning_records() if float(r.run_secs[0]) < 1e9]
    assert len(valid) == sum(record.latency_s is not None for record in candidates_of(tmp_path))
    assert stock.query_tuning_record(normalized(function), tvm.target.Target(LLVM), "main")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory):
    """A finished run on the simulated A100: its work directory and database."""
    work_dir = tmp_path_factory.mktemp("simulated")
    database = run(
        [TuningTask(name="main", mod=parse_workload(SMALL).primfunc(), weight=3)],
        device="sim:a100",
        work_dir=work_dir,
        trials=32,
        trials_per_round=16,
        seed=1,
        population=32,
    )
    return work_dir, database


@pytest.mark.parametrize("device", ["sim:orin-nano", "sim:xavier-nx"])
def test_a_simulated_jetson_tunes_like_any_other_device(device: str, tmp_path: Path) -> None:
    run(
        [TuningTask(name="main", mod=parse_workload(SMALL).primfunc(), weight=1)],
        device=device,
        work_dir=tmp_path,
        trials=8,
        trials_per_round=8,
        seed=1,
        population=16,
    )
    summary = summarize(tmp_path)
    assert summary.simulated
    assert summary.tasks[0].best is not None


def test_the_deployed_kernel_is_the_measured_choice(simulated) -> None:
    work_dir, database = simulated
    function = normalized(parse_workload(SMALL).primfunc())
    target = tvm.target.Target("nvidia/nvidia-a100")
    summary = summarize(work_dir)
    (task,) = summary.tasks
    assert summary.simulated
    assert task.weight == 3
    assert task.best is not None
    finals = {r.key: r for r in records_of(work_dir) if isinstance(r, FinalRecord)}
    assert task.best.key in finals
    record = database.query_tuning_record(function, target, "main")
    from tvm_energy.meta_schedule.traces import trace_key

    assert trace_key(record.trace) == task.best.key
    with database:
        assert ms.database.Database.current() is not None
        schedule = ms.tir_integration.compile_tir(database, function, target)
    source = tvm.compile(schedule.mod, target=target).mod.imports[0].inspect_source()
    assert "__global__" in source


def test_parents_are_the_fastest_kernels(simulated) -> None:
    _, database = simulated
    workload = database.commit_workload(normalized(parse_workload(SMALL).primfunc()))
    seconds = [
        fmean(float(value) for value in record.run_secs)
        for record in database.get_all_tuning_records()
    ]
    parents = [
        fmean(float(value) for value in record.run_secs)
        for record in database.get_top_k(workload, 10)
    ]
    assert parents == sorted(seconds)[:10]


def test_measured_and_predicted_are_kept_apart(simulated) -> None:
    work_dir, _ = simulated
    tried = candidates_of(work_dir)
    assert len(tried) == 32
    measured = [record for record in tried if record.measured]
    assert 0 < len(measured) < len(tried)
    assert all(record.measured.simulated for record in measured if record.measured)
    assert all(record.measured.stderr_j > 0 for record in measured if record.measured)


def test_the_model_is_left_as_json_and_loads(simulated) -> None:
    work_dir, database = simulated
    from tvm_energy.energy_model.xgb import XgbKernelModel

    model = XgbKernelModel()
    model.load(work_dir / "energy_model.json")
    assert model.relative_error == database.core.session.model.relative_error


def test_continuing_tries_nothing_twice(tmp_path: Path) -> None:
    task = TuningTask(name="main", mod=parse_workload(SMALL).primfunc())

    def tune(trials: int) -> None:
        run(
            [task],
            device="sim:a100",
            work_dir=tmp_path,
            trials=trials,
            trials_per_round=8,
            seed=5,
            population=32,
        )

    tune(16)
    first = candidates_of(tmp_path)
    finals = sum(isinstance(r, FinalRecord) for r in records_of(tmp_path))
    tune(16)
    assert candidates_of(tmp_path) == first
    assert sum(isinstance(r, FinalRecord) for r in records_of(tmp_path)) == finals
    tune(24)
    everything = candidates_of(tmp_path)
    assert everything[: len(first)] == first
    assert len(everything) > len(first)
    # The search may meet an old kernel again, but it is neither recorded nor measured anew.
    assert max(Counter(record.key for record in everything).values()) == 1
    with pytest.raises(WorkDirError, match="belongs to device"):
        run([task], device="sim:rtx4090", work_dir=tmp_path, trials=32)


def test_options_turn_a_stock_call_energy_aware(tmp_path: Path) -> None:
    function = parse_workload("add:size=131072").primfunc()
    target = tvm.target.Target("nvidia/nvidia-a100")
    with tvm_energy.options(target, tmp_path, objective="edp", device="sim:a100", seed=1) as parts:
        database = ms.tune_tir(
            function,
            target,
            str(tmp_path),
            8,
            num_trials_per_iter=8,
            **parts,
        )
        with pytest.raises(WorkDirError, match="in use"):
            tvm_energy.options(target, tmp_path, device="sim:a100")
    assert isinstance(parts["strategy"], ReservoirSearch)
    assert all(record.error is None for record in candidates_of(tmp_path))
    assert database.query_schedule(normalized(function), target, "main") is not None
    summary = summarize(tmp_path)
    assert summary.objective == "edp"
    assert summary.tasks[0].best is not None
    assert any(isinstance(record, FinalRecord) for record in records_of(tmp_path))


def test_options_leave_the_search_to_a_script_that_has_its_own(tmp_path: Path) -> None:
    function = parse_workload("add:size=131072").primfunc()
    target = tvm.target.Target("nvidia/nvidia-a100")
    with pytest.raises(ConfigurationError, match="'reservoir' or None, got 'evolutionary'"):
        tvm_energy.options(target, tmp_path, device="sim:a100", strategy="evolutionary")
    close_loggers()  # stock tune_tir fails in a process where another call left its handlers
    with tvm_energy.options(target, tmp_path, device="sim:a100", strategy=None) as parts:
        assert "strategy" not in parts
        ms.tune_tir(
            function,
            target,
            str(tmp_path),
            8,
            num_trials_per_iter=8,
            strategy=evolutionary_search(16),
            **parts,
        )
    assert candidates_of(tmp_path)
    with pytest.raises(ConfigurationError, match="population= is that of"):
        tvm_energy.tune_tir(
            function,
            target,
            tmp_path / "other",
            8,
            device="sim:a100",
            population=64,
            strategy="evolutionary",
        )


def test_a_task_that_cannot_be_scheduled_is_left_out(tmp_path: Path) -> None:
    def broken(schedule: object) -> None:
        raise ValueError("this schedule rule is broken")

    run(
        [
            TuningTask(name="bad", mod=parse_workload("relu:size=4096").primfunc()),
            TuningTask(name="good", mod=parse_workload("add:size=131072").primfunc()),
        ],
        device="sim:a100",
        work_dir=tmp_path,
        trials=4,
        trials_per_round=4,
        seed=1,
        population=16,
        stock={"special_space": {"bad": broken}},
    )
    by_name = {task.name: task for task in summarize(tmp_path).tasks}
    assert by_name["good"].best is not None
    assert by_name["bad"].best is None
    assert "this schedule rule is broken" in str(by_name["bad"].errors)


@derived_object
class FailingBuilder(ms.builder.PyBuilder):
    def build(self, build_inputs):
        return [ms.builder.BuilderResult(None, "build: the compiler is missing")] * len(
            build_inputs
        )


def test_all_builds_failing_ends_with_the_reason(tmp_path: Path) -> None:
    run(
        [TuningTask(name="main", mod=parse_workload("add:size=131072").primfunc())],
        device="sim:a100",
        work_dir=tmp_path,
        trials=4,
        trials_per_round=4,
        seed=1,
        population=16,
        stock={"builder": FailingBuilder()},
    )
    (task,) = summarize(tmp_path).tasks
    assert task.best is None
    assert task.reason is not None
    assert "the compiler is missing" in str(task.errors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"trials_per_round": -1}, "trials per round must be at least 1"),
        ({"population": 0}, "population must be at least 1"),
        ({"objective": "joules"}, "unknown objective 'joules'"),
        ({"policy": "some"}, "unknown policy 'some'"),
        ({"device": "sim:abacus"}, "abacus"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"tasks": []}, "nothing to tune"),
    ],
)
def test_wrong_arguments(changes: dict, message: str, tmp_path: Path) -> None:
    arguments = {
        "tasks": [TuningTask(name="main", mod=parse_workload(SMALL).primfunc())],
        "device": "sim:a100",
        "work_dir": tmp_path / "out",
        "trials": 4,
    }
    with pytest.raises(ConfigurationError, match=message):
        run(**(arguments | changes))


def test_energy_without_a_meter_is_refused(tmp_path: Path, monkeypatch) -> None:
    from tvm_energy.meters import rapl

    def no_meter(**_: object) -> None:
        raise MeterUnavailable("there is no processor energy counter")

    monkeypatch.setattr(rapl, "open_rapl_meter", no_meter)
    with pytest.raises(MeterUnavailable, match="cannot be measured on cpu: there is no processor"):
        tvm_energy.tune_tir(parse_workload(SMALL).primfunc(), LLVM, tmp_path, 4)


def test_another_meter_than_the_simulated_card_has(tmp_path: Path) -> None:
    device = open_device("sim:a100")
    try:
        tvm_energy.tune_tir(
            parse_workload(SMALL).primfunc(),
            device.target,
            tmp_path,
            4,
            device=device,
            meter=lambda: WallMeter(
                device.gpu.timeline.cumulative_j, device.gpu.clock, simulated=True
            ),
            policy="all",
            objective="energy",
            seed=1,
        )
    finally:
        device.close()
    records = records_of(tmp_path)
    assert records[0].meter["meter"] == "wall"
    measured = [r.measured for r in records if isinstance(r, FinalRecord)]
    assert measured
    for item in measured:
        assert (item.meter, item.scope, item.simulated) == ("wall", "machine", True)
        limit_w = device.gpu.spec.power_limit_w
        assert BASE_W + 20 * FACTOR < item.power_w < BASE_W + FACTOR * limit_w


def test_another_meter_on_this_cpu_works_in_the_worker(tmp_path: Path) -> None:
    tvm_energy.tune_tir(
        parse_workload(SMALL).primfunc(),
        LLVM,
        tmp_path,
        2,
        meter=WallMeter(),
        policy="all",
        objective="energy",
        plan=MeasurementPlan(window_s=0.2),
        finalists=0,
        seed=1,
    )
    records = records_of(tmp_path)
    assert records[0].meter["device_name"] == "rack 7"
    measured = [r.measured for r in records if isinstance(r, CandidateRecord) and r.measured]
    assert measured
    assert all(item.meter == "wall" and not item.simulated for item in measured)
    assert all(item.energy_j > 0 for item in measured)


def test_meters_that_cannot_be_used_are_named() -> None:
    cases = {
        "cpu": [
            ("nvml", ConfigurationError, "no meter 'nvml' measures cpu; use rapl"),
            (lambda: 1 / 0, MeterUnavailable, "cannot be opened .*division by zero"),
            (lambda: "a meter", MeterUnavailable, "cannot be opened .*'a meter' is no meter"),
            (threading.Lock(), MeterUnavailable, "cannot be opened .*pickle"),
            (WallMeter(simulated=True), ConfigurationError, "is simulated, but device cpu is real"),
        ],
        "sim:a100": [
            ("nvml", ConfigurationError, "has a simulated sensor of its own"),
            (object(), ConfigurationError, "is no meter: it has no MeterInfo"),
            (WallMeter(), ConfigurationError, "is real, but device sim:a100 is simulated"),
        ],
    }
    for name, meters in cases.items():
        device = open_device(name)
        own = device.meter
        try:
            for meter, error, message in meters:
                with pytest.raises(error, match=message):
                    device.use_meter(meter)
                assert device.meter == own
        finally:
            device.close()


def test_a_tuned_network_equals_onnx_runtime(tmp_path: Path) -> None:
    from test_networks import run_onnxruntime, small_model

    from tvm_energy.meta_schedule.networks import compile_network, extract_tasks, import_onnx

    model = small_model()
    network = import_onnx(model, name="small")
    target = tvm.target.Target(LLVM)
    tasks = [
        TuningTask(name=task.name, mod=task.mod, weight=task.weight)
        for task in extract_tasks(network, target)
    ]
    database = run(
        tasks,
        device="cpu",
        target=target,
        work_dir=tmp_path,
        trials=4 * len(tasks),
        trials_per_round=4,
        objective="latency",
        seed=1,
        population=32,
    )
    compiled = compile_network(network, target, database)
    assert compiled.tuned
    inputs = network.random_inputs(seed=2)
    expected = run_onnxruntime(model, inputs)
    for ours, theirs in zip(compiled.run(inputs), expected, strict=True):
        assert np.ptp(theirs) > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_tune_relax_takes_the_stock_arguments(tmp_path: Path) -> None:
    from test_networks import small_model

    from tvm_energy.meta_schedule.networks import import_onnx, lower

    target = tvm.target.Target("nvidia/nvidia-a100")
    module = lower(import_onnx(small_model(), name="small"), target)
    database = tvm_energy.tune_relax(
        module,
        {},
        target,
        str(tmp_path),
        4,
        op_names=["softmax"],
        num_trials_per_iter=4,
        seed=1,
        device="sim:a100",
        strategy=evolutionary_search(16),
    )
    (task,) = summarize(tmp_path).tasks
    assert "softmax" in task.name
    assert task.best is not None
    with target, database, tvm.transform.PassContext(opt_level=3):
        applied = tvm.relax.transform.MetaScheduleApplyDatabase()(module)
    scheduled = [
        variable.name_hint
        for variable, function in applied.functions_items()
        if function.attrs and function.attrs.get("tirx.is_scheduled")
    ]
    assert any("softmax" in name for name in scheduled)


def test_a_run_begins_with_what_an_earlier_one_learned(simulated, tmp_path: Path) -> None:
    """Of another kernel of the same device; the prior may differ."""
    earlier, _ = simulated
    function = parse_workload("matmul:m=96,n=128,k=160").primfunc()

    def tune(work_dir: Path, **changes: object) -> None:
        run(
            [TuningTask(name="main", mod=function)],
            device="sim:a100",
            work_dir=work_dir,
            trials=16,
            trials_per_round=16,
            seed=2,
            population=32,
            **changes,
        )

    tune(tmp_path / "warm", model=earlier, prior="counts")
    header = records_of(tmp_path / "warm")[0]
    assert header.model["prior"] == "counts"
    assert header.model["start"]["samples"] == len(
        [record for record in candidates_of(earlier) if record.latency_s is not None]
    )
    # The model that it leaves hands the earlier kernels on.
    with tvm_energy.options(
        tvm.target.Target("nvidia/nvidia-a100"),
        tmp_path / "third",
        device="sim:a100",
        model=tmp_path / "warm" / "energy_model.json",
        finalists=0,
    ):
        pass
    assert records_of(tmp_path / "third")[0].model["start"]["samples"] > 32


def test_a_model_of_another_device_is_refused(simulated, tmp_path: Path) -> None:
    earlier, _ = simulated
    function = parse_workload(SMALL).primfunc()
    with pytest.raises(ConfigurationError, match=r"of device .*sim:a100.*not of sim:rtx4090"):
        tvm_energy.tune_tir(
            function,
            "nvidia/geforce-rtx-4090",
            tmp_path,
            16,
            device="sim:rtx4090",
            model=earlier,
        )
    assert not (tmp_path / FILE_NAME).exists()
