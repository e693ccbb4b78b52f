"""The parts alone: the swap of builder and runner, workers that crash or hang, the cost model."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import tvm
from conftest import MATMUL, SMALL_SEARCH, trials
from tvm import auto_scheduler

import tvm_energy
from tvm_energy import ansor
from tvm_energy.ansor import device as devices
from tvm_energy.ansor.build import build_library
from tvm_energy.ansor.cost_model import read_features
from tvm_energy.ansor.kernel_description import describe_kernel
from tvm_energy.ansor.measuring import BUILD, RUN
from tvm_energy.energy_model.xgb import XgbKernelModel
from tvm_energy.kernels.pool import WorkerPool
from tvm_energy.measurement import MeasurementPlan
from tvm_energy.objective import parse_objective
from tvm_energy.policy import parse_policy
from tvm_energy.session import Session

# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def cpu():
    device = ansor.open_device("cpu")
    yield device
    device.close()


@pytest.fixture(scope="module")
def gpu_task():
    return ansor.workload_task(MATMUL, device="sim:a100")


def sampled(task, count: int) -> list:
    policy = auto_scheduler.SketchPolicy(task, params=dict(SMALL_SEARCH), seed=3, verbose=0)
    states = list(policy.sample_initial_population())
    _, lowered = read_features(task, states)
    valid = [state for state, ok in zip(states, lowered, strict=True) if ok]
    assert len(valid) >= count
    return [auto_scheduler.measure.MeasureInput(task, state) for state in valid[:count]]


def session(objective: str = "latency") -> Session:
    return Session(
        objective=parse_objective(objective, max_power_w=None),
        policy=parse_policy("all"),
        model=XgbKernelModel(seed=1),
    )


def test_every_public_name_exists() -> None:
    assert ansor.__all__ == sorted(set(ansor.__all__))
    for name in ansor.__all__:
        assert callable(getattr(ansor, name))
    assert not hasattr(ansor, "no_such_name")
    assert tvm_energy.__version__


def test_stock_functions_are_back_after_the_block_even_after_an_error(cpu) -> None:
    task = ansor.workload_task(MATMUL, device="cpu")
    (item,) = sampled(task, 1)

    def built_by_us() -> bool:
        cpu.forget()
        builder = auto_scheduler.LocalBuilder(timeout=60)
        builder.build([item], verbose=0)
        gc.collect()  # stock's pool of workers, which ends them when it is collected, in whatever thread
        return bool(cpu.artifacts)

    def fail() -> None:
        with ansor.measuring_on(cpu):
            assert built_by_us()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tvm.get_global_func(BUILD)
    assert tvm.get_global_func(RUN)
    assert not built_by_us()


def crash(serialized, folder: str):
    os._exit(11)


def hang(serialized, folder: str):
    time.sleep(1000)


@pytest.mark.parametrize(("build", "number"), [(crash, 2), (hang, 6)])
def test_a_builder_that_dies_costs_one_candidate(cpu, build, number: int) -> None:
    """Both kinds of death, through Ansor's own measurer; the next batch is built as ever."""
    task = ansor.workload_task(MATMUL, device="cpu")
    (item,) = sampled(task, 1)
    good = cpu._builds._build
    pool = cpu._builds._pool
    try:
        cpu._builds._build = build
        cpu._builds._pool = WorkerPool(1, 5.0)
        with ansor.measuring_on(cpu):
            assert measured([item]).error_no == number
        cpu._builds._pool.close()
    finally:
        cpu._builds._build, cpu._builds._pool = good, pool
    with ansor.measuring_on(cpu):
        assert measured([item]).error_no == 0


def measured(items: list):
    builder = auto_scheduler.LocalBuilder(timeout=60)
    runner = auto_scheduler.LocalRunner(number=1, repeat=1, min_repeat_ms=0)
    built = builder.build(items, verbose=0)
    (result,) = runner.run(items, built, verbose=0)
    return result


CRASHING_KERNEL = "int* nowhere = 0; *nowhere = 1;"
HANGING_KERNEL = "for (volatile int i = 0; ; i = i) {}"


@pytest.mark.parametrize(("body", "number"), [(CRASHING_KERNEL, 4), (HANGING_KERNEL, 7)])
def test_a_kernel_that_crashes_or_hangs_does_not_take_the_tuner_down(
    cpu, tmp_path: Path, body: str, number: int
) -> None:
    task = ansor.workload_task(MATMUL, device="cpu")
    (item,) = sampled(task, 1)
    cpu._timer._pool = WorkerPool(1, 8.0)
    with ansor.measuring_on(cpu):
        builder = auto_scheduler.LocalBuilder(timeout=60)
        built = builder.build([item], verbose=0)
        (artifact,) = cpu.artifacts.values()
        good = Path(artifact.path).read_bytes()
        Path(artifact.path).unlink()
        compile_evil(body, tmp_path, artifact.path)
        runner = auto_scheduler.LocalRunner(number=1, repeat=1, min_repeat_ms=0)
        (result,) = runner.run([item], built, verbose=0)
        assert result.error_no == number
        assert len(result.error_msg) > 0
        Path(artifact.path).unlink()
        Path(artifact.path).write_bytes(good)
        (result,) = runner.run([item], built, verbose=0)
        assert result.error_no == 0
    cpu._timer._pool.close()


def compile_evil(body: str, folder: Path, path: str) -> None:
    """A TVM kernel library with this body."""
    import subprocess

    source = folder / "kernel.c"
    source.write_text(
        f"int evil(void* a, int* b, int n, void* r, int* c) {{ {body} return 0; }}\n"
        'const char __tvm_main__[] = "evil";\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, str(source)], check=True)


def test_scores_are_positive_and_programs_that_cannot_be_lowered_come_last(gpu_task) -> None:
    # Large enough that some samples exceed the shared memory of a block.
    task = ansor.workload_task("matmul:m=512,n=512,k=512", device="sim:a100")
    policy = auto_scheduler.SketchPolicy(task, params=dict(SMALL_SEARCH), seed=3, verbose=0)
    states = list(policy.sample_initial_population())[:64]
    _, lowered = read_features(task, states)
    assert 0 < lowered.sum() < len(states)
    model = ansor.EnergyCostModel(session())
    scores = np.array(model.predict(task, states))
    assert np.all(np.isneginf(scores) == ~lowered)
    assert np.all(scores[lowered] > 0)
    assert model.predict(task, []) == []


def test_stage_scores_have_the_packed_form_of_ansor(gpu_task) -> None:
    states = [item.state for item in sampled(gpu_task, 2)]
    packed = ansor.EnergyCostModel(session()).predict_stages(gpu_task, states)
    position = len(states)
    for _ in states:
        position += 1 + int(packed[position])
    assert position == len(packed)


def test_cost_model_and_callback_work_in_a_stock_tuning_call(gpu_task, tmp_path: Path) -> None:
    """As in docs/ansor.md: the parts in a script that calls ``SearchTask.tune`` itself."""
    device = ansor.open_device("sim:a100")
    run = session("energy")
    try:
        policy = auto_scheduler.SketchPolicy(
            gpu_task,
            ansor.EnergyCostModel(run),
            params=dict(SMALL_SEARCH),
            seed=1,
            verbose=0,
        )
        options = trials(
            8,
            4,
            builder=auto_scheduler.LocalBuilder(n_parallel=2),
            measure_callbacks=[ansor.EnergyMeasureCallback(run, device, MeasurementPlan())],
        )
        with ansor.measuring_on(device):
            gpu_task.tune(options, search_policy=policy)
    finally:
        device.close()
    (workload,) = run.task_names()
    assert len(run.kernels(workload)) == 8
    assert any(kernel.measured for kernel in run.kernels(workload).values())


def test_a_description_counts_what_the_kernel_does(gpu_task) -> None:
    (item,) = sampled(gpu_task, 1)
    schedule, tensors = gpu_task.compute_dag.apply_steps_from_state(item.state)
    (launch,) = describe_kernel(schedule, tensors, gpu_task.target).launches
    threads = launch.blocks * launch.threads_per_block
    assert threads >= 1
    # One fused multiply-add a warp instruction of 32 lanes; idle lanes of part warps count too.
    assert launch.instructions.fma32 * 32 >= 64**3
    written = [a for a in launch.global_accesses if a.store and not a.buffer.startswith("local")]
    assert sum(a.bytes_requested for a in written) == pytest.approx(64 * 64 * 4)


def test_task_inputs_are_refused() -> None:
    device = ansor.open_device("sim:a100")
    task = ansor.workload_task("matmul:m=8,n=8,k=8", device="sim:a100", task_inputs=["a"])
    try:
        with pytest.raises(tvm_energy.errors.ConfigurationError, match="task_inputs"):
            devices.check_tasks(device, {"x": task})
    finally:
        device.close()


def test_builds_name_their_arguments(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="cpu")
    (item,) = sampled(task, 1)
    path, arguments = build_library(item.serialize(), str(tmp_path))
    assert Path(path).stat().st_size > 0
    assert arguments == [((64, 64), "float32")] * 3
