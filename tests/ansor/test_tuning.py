"""Tuning with the real Ansor: on this CPU through llvm, and on a simulated GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from conftest import MATMUL, SMALL_SEARCH, trials
from tvm import auto_scheduler

from tvm_energy import ansor
from tvm_energy.ansor.names import names_of, workload_of
from tvm_energy.ansor.tuning import recovered
from tvm_energy.ansor_log import LOG_FILE, names_of_line, read_log
from tvm_energy.errors import ConfigurationError, MeterUnavailable, WorkDirError
from tvm_energy.logs.merge import merge
from tvm_energy.logs.prune import prune
from tvm_energy.logs.verify import Counts, verify
from tvm_energy.meta_schedule.workloads import parse_workload
from tvm_energy.records import FILE_NAME, CandidateRecord, FinalRecord, read_records
from tvm_energy.replay import summarize
from tvm_energy.session import Session

COMMAND_LINE = "from tvm_energy.cli import main; main()"


def records_of(work_dir: Path) -> list:
    return list(read_records(work_dir / FILE_NAME))


def lines_of(work_dir: Path) -> dict:
    return {(w, key): line for w, key, line in read_log(work_dir / LOG_FILE)}


def test_a_kernel_tuned_for_this_cpu_equals_numpy(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="cpu")
    summary = ansor.tune(
        task,
        trials(6, 3),
        work_dir=tmp_path,
        objective="latency",
        search_policy_params=SMALL_SEARCH,
        seed=1,
    )
    assert summary.tasks[0].candidates == 6
    assert summary.tasks[0].failed == 0
    schedule, tensors = ansor.apply_best(task, tmp_path)
    kernel = tvm.build(schedule, tensors, target=task.target)
    workload = parse_workload(MATMUL)
    inputs = workload.random_inputs(seed=3)
    expected = workload.reference(inputs)[0]
    output = tvm.nd.array(np.zeros_like(expected))
    kernel(*map(tvm.nd.array, inputs), output)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_log_is_stock_and_holds_true_times(simulated) -> None:
    work_dir, _ = simulated
    pairs = list(auto_scheduler.load_records(str(work_dir / LOG_FILE)))
    latency = {
        (r.workload, r.key): r.latency_s
        for r in records_of(work_dir)
        if isinstance(r, CandidateRecord)
    }
    assert len(pairs) == len(latency) >= 36
    for item, result in pairs:
        seconds = latency[names_of(item)]
        if int(result.error_no):
            assert seconds is None
        else:
            assert np.mean([float(v) for v in result.costs]) == pytest.approx(seconds, rel=1e-4)


def test_records_are_joined_by_the_content_of_the_line(simulated) -> None:
    work_dir, tasks = simulated
    workloads = {workload_of(task) for task in tasks}
    assert len(workloads) == 3
    for (workload, key), line in lines_of(work_dir).items():
        assert workload in workloads
        # A program that Ansor read and rebuilt has the name that it had when it was measured.
        assert names_of(recovered(line)) == (workload, key)
    line = json.loads(line)
    line["r"] = [[1.0], 0, 1.0, 1]
    assert names_of_line(json.dumps(line)) == (workload, key)


def test_each_winner_is_a_measured_finalist(simulated) -> None:
    work_dir, _ = simulated
    summary = summarize(work_dir)
    assert summary.simulated
    assert [task.weight for task in summary.tasks] == [1, 2, 1]
    finals = {(r.workload, r.key) for r in records_of(work_dir) if isinstance(r, FinalRecord)}
    for task in summary.tasks:
        assert task.best is not None
        assert task.best.measured
        assert (task.workload, task.best.key) in finals


@pytest.mark.parametrize("index", [0, 1, 2])
def test_winners_of_the_simulated_gpu_compute_what_numpy_does(simulated, index: int) -> None:
    work_dir, tasks = simulated
    workload = parse_workload(tasks[index].desc)
    best = {task.workload: task.best.key for task in summarize(work_dir).tasks}
    name = workload_of(tasks[index])
    program = recovered(threads_as_loops(lines_of(work_dir)[name, best[name]]))
    schedule, tensors = tasks[index].compute_dag.apply_steps_from_state(program.state)
    kernel = tvm.build(schedule, tensors, target="llvm")
    inputs = workload.random_inputs(seed=3)
    expected = workload.reference(inputs)[0]
    output = tvm.nd.array(np.zeros_like(expected))
    kernel(*map(tvm.nd.array, inputs), output)
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-3, atol=1e-3)


def threads_as_loops(line: str) -> str:
    """The same tiling and staging with GPU threads as serial loops, so that a CPU can run it."""
    value = json.loads(line)
    for step in value["i"][1][1]:
        if step[0] == "AN" and step[3] >= 4:  # vthread, blockIdx and threadIdx
            step[3] = 0
    return json.dumps(value)


def test_objectives_choose_among_the_same_records(simulated) -> None:
    work_dir, _ = simulated
    for objective, attribute in (("latency", "latency_s"), ("energy", "energy_j")):
        for task in summarize(work_dir, objective).tasks:
            assert getattr(task.best, attribute) <= getattr(task.fastest, attribute) * 1.001


def test_stock_ansor_applies_our_choice_from_an_exported_log(simulated, tmp_path: Path) -> None:
    work_dir, tasks = simulated
    out = tmp_path / "best.json"
    assert ansor.export_log(work_dir, out, objective="energy") == 3
    assert len(out.read_text().splitlines()) == 3
    chosen = {task.workload: task.best.key for task in summarize(work_dir, "energy").tasks}
    for task in tasks:
        best, _ = auto_scheduler.measure_record.load_best_record(str(out), task.workload_key)
        workload, key = names_of(best)
        assert chosen[workload] == key
        ours = ansor.apply_best(task, work_dir, objective="energy")
        stock = task.apply_best(str(out))
        assert str(tvm.lower(*stock, simple_mode=True)) == str(tvm.lower(*ours, simple_mode=True))
        with auto_scheduler.ApplyHistoryBest(str(out)) as history:
            found = history.query(task.target, task.workload_key, False, task.compute_dag, "main")
            assert found is not None
    with pytest.raises(WorkDirError, match="exists"):
        ansor.export_log(work_dir, out)


def test_the_command_line_exports_the_same_log(simulated, tmp_path: Path) -> None:
    work_dir, _ = simulated
    ansor.export_log(work_dir, tmp_path / "best.json", objective="edp")

    def export(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", COMMAND_LINE, "export", str(work_dir), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    to = ("--to", str(tmp_path / "again.json"))
    done = export(*to, "--objective", "edp")
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout.lower()
    assert (tmp_path / "again.json").read_text() == (tmp_path / "best.json").read_text()
    refused = export(*to)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    done = export(*to, "--force", "--json")
    assert json.loads(done.stdout)["kernels"] == 3
    assert export(*to, "--force", "--clock-choice", "one").returncode == 2


def test_a_pruned_run_is_in_order_and_stock_ansor_reads_it(simulated, tmp_path: Path) -> None:
    work_dir, tasks = simulated
    assert list(verify(work_dir, Counts())) == []
    result = prune(work_dir, tmp_path / "pruned", keep=1)
    assert 3 <= result.kernels == result.ansor_records < 36
    assert list(verify(tmp_path / "pruned", Counts())) == []
    merged = merge([work_dir, tmp_path / "pruned"], tmp_path / "merged")
    assert merged.ansor_records == len(lines_of(work_dir))
    log = tmp_path / "pruned" / LOG_FILE
    assert len(list(auto_scheduler.load_records(str(log)))) == result.ansor_records
    best = {task.workload: task.best.key for task in summarize(work_dir).tasks}
    assert {t.workload: t.best.key for t in summarize(log.parent).tasks} == best
    for task in tasks:
        assert task.apply_best(str(log))


def test_a_run_is_continued_and_nothing_is_tried_twice(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="sim:a100")
    arguments = {"work_dir": tmp_path, "search_policy_params": SMALL_SEARCH, "finalists": 0}
    ansor.tune(task, trials(4, 4), seed=1, device="sim:a100", **arguments)
    first = lines_of(tmp_path)
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"i": [["torn')  # as a killed run leaves it
    summary = ansor.tune(task, trials(8, 4), seed=1, device="sim:a100", **arguments)
    assert summary.tasks[0].candidates == 8
    assert list(lines_of(tmp_path))[:4] == list(first)
    keys = [r.key for r in records_of(tmp_path) if isinstance(r, CandidateRecord)]
    assert len(keys) == len(set(keys)) == 8
    ansor.tune(task, trials(8, 4), seed=1, device="sim:a100", **arguments)
    assert len(lines_of(tmp_path)) == 8


def test_predictions_lead_from_the_second_round_on(tmp_path: Path, monkeypatch) -> None:
    """Fewer kernels than MetaSchedule's search waits for."""
    led: list[tuple[int, bool]] = []
    scores = Session.scores

    def watched(self, workload: str, features) -> np.ndarray:
        known = len(self.kernels(workload))
        again = [scores(self, workload, features) for _ in range(2)]
        led.append((known, bool(np.array_equal(*again))))  # random scores differ each time
        return again[0]

    monkeypatch.setattr(Session, "scores", watched)
    task = ansor.workload_task(MATMUL, device="sim:a100")
    ansor.tune(
        task,
        trials(20, 10),
        work_dir=tmp_path,
        device="sim:a100",
        search_policy_params=SMALL_SEARCH,
        finalists=0,
        seed=1,
    )
    assert {known for known, _ in led} == {0, 10}
    assert all(by_model == (known > 0) for known, by_model in led)


def test_the_same_seed_gives_the_same_simulated_run(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="sim:a100")
    logs = []
    for name in ("a", "b"):
        ansor.tune(
            task,
            trials(4, 4),
            work_dir=tmp_path / name,
            device="sim:a100",
            search_policy_params=SMALL_SEARCH,
            seed=5,
        )
        records = [r for r in records_of(tmp_path / name) if isinstance(r, CandidateRecord)]
        logs.append([(r.key, r.latency_s, r.measured and r.measured.energy_j) for r in records])
    assert logs[0] == logs[1]


def test_a_run_begins_with_what_an_earlier_one_learned(simulated, tmp_path: Path) -> None:
    task = ansor.workload_task("matmul:m=96,n=64,k=80", device="sim:a100")
    ansor.tune(
        task,
        trials(4, 4),
        work_dir=tmp_path,
        device="sim:a100",
        search_policy_params=SMALL_SEARCH,
        seed=5,
        model=simulated[0],
        prior="counts",
    )
    header = records_of(tmp_path)[0]
    assert header.model["prior"] == "counts"
    assert header.model["start"]["samples"] >= 30


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    gpu = ansor.workload_task(MATMUL, device="sim:a100")
    cpu = ansor.workload_task(MATMUL, device="cpu")
    with pytest.raises(ConfigurationError, match="target 'cuda'"):
        ansor.tune(gpu, trials(2, 2), work_dir=tmp_path, device="cpu", objective="latency")
    with pytest.raises(ConfigurationError, match="target 'llvm'"):
        ansor.tune(cpu, trials(2, 2), work_dir=tmp_path, device="sim:a100")
    with pytest.raises(ConfigurationError, match="trials must be at least 1, got 0"):
        ansor.tune(gpu, trials(0, 2), work_dir=tmp_path, device="sim:a100")
    with pytest.raises(ConfigurationError, match="the same"):
        ansor.tune([gpu, gpu], trials(2, 2), work_dir=tmp_path, device="sim:a100")
    with pytest.raises(ConfigurationError, match="as many weights"):
        ansor.tune(gpu, trials(2, 2), work_dir=tmp_path, device="sim:a100", task_weights=[1, 2])
    with pytest.raises(ConfigurationError, match="'nothing' is not known; use one of a100"):
        ansor.tune(gpu, trials(2, 2), work_dir=tmp_path, device="sim:nothing")
    with pytest.raises(WorkDirError, match="does not exist"):
        ansor.apply_best(gpu, tmp_path)


def test_energy_on_a_cpu_without_a_meter_is_refused(tmp_path: Path) -> None:
    task = ansor.workload_task(MATMUL, device="cpu")
    device = ansor.open_device("cpu")
    if device.meter is not None:
        device.close()
        pytest.skip("this CPU's energy can be read")
    device.close()
    with pytest.raises(MeterUnavailable, match="energy"):
        ansor.tune(task, trials(2, 2), work_dir=tmp_path)


def test_apply_best_names_a_task_that_was_not_tuned(simulated) -> None:
    other = ansor.workload_task("matmul:m=32,n=32,k=32", device="sim:a100")
    with pytest.raises(ConfigurationError, match="no chosen kernel for task matmul:m=32"):
        ansor.apply_best(other, simulated[0])
