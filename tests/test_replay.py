from __future__ import annotations

import os
from pathlib import Path

import pytest
from log_examples import candidate, final, header, round_record, two_tasks, write_log

from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.logs.load import comparable
from tvm_energy.records import FILE_NAME, Record, TaskRecord
from tvm_energy.replay import TaskSummary, summarize


def only_task(records: list[Record], objective: str | None = None) -> TaskSummary:
    (task,) = summarize(records, objective).tasks
    return task


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())
    }


# -- a finished run --------------------------------------------------------------------------------


def test_the_run_as_a_whole() -> None:
    summary = summarize(two_tasks())
    assert summary.simulated
    assert (summary.device, summary.runs) == ("sim:a100", 1)
    assert (summary.objective, summary.policy) == ("energy:slack=0.05", "snr")
    assert [task.name for task in summary.tasks] == ["fused_conv2d_add_relu", "matmul", "broken"]


def test_a_task_with_everything() -> None:
    task = summarize(two_tasks()).tasks[0]
    assert (task.candidates, task.failed) == (5, 1)
    assert (task.energy_measurements, task.predicted_only, task.finalists) == (3, 1, 0)
    assert task.errors == {"build: TypeError: no such thing": 1}
    assert task.reason is None
    assert task.device_s == pytest.approx(9.0)
    assert task.fastest is not None
    assert task.best is not None
    assert (task.fastest.key, task.best.key) == ("a", "b")
    assert task.saved_fraction == pytest.approx(0.25)
    assert task.best.measured
    assert task.best.energy_j == pytest.approx(0.150)
    assert task.best.energy_stderr_j == pytest.approx(0.00015)
    assert task.best.power_w == pytest.approx(0.150 / 1.04e-3)


def test_a_task_that_never_ran_says_why() -> None:
    task = summarize(two_tasks()).tasks[2]
    assert (task.fastest, task.best, task.saved_fraction) == (None, None, None)
    assert (task.candidates, task.failed) == (2, 2)
    assert task.reason == "none of 2 candidates ran; most often: run: timeout: killed after 60 s"


def test_totals_count_every_call() -> None:
    totals = summarize(two_tasks()).totals
    assert totals is not None
    assert totals.tasks == 2
    assert totals.fastest_latency_s == pytest.approx(3 * 1.00e-3 + 2.0e-6)
    assert totals.best_latency_s == pytest.approx(3 * 1.04e-3 + 2.0e-6)
    assert totals.fastest_energy_j == pytest.approx(3 * 0.200 + 3.0e-4)
    assert totals.best_energy_j == pytest.approx(3 * 0.150 + 3.0e-4)
    assert totals.saved_fraction == pytest.approx(1 - 0.4503 / 0.6003)


@pytest.mark.parametrize(
    ("objective", "best"),
    [("latency", "a"), ("energy", "c"), ("edp", "c"), ("energy:slack=0.01", "a")],
)
def test_another_objective_chooses_again(objective: str, best: str) -> None:
    summary = summarize(two_tasks(), objective)
    assert summary.objective == objective
    assert summary.tasks[0].best is not None
    assert summary.tasks[0].best.key == best


def test_weighted_takes_the_power_limit_from_the_log() -> None:
    assert summarize(two_tasks(), "weighted:eta=0.5").objective == (
        "weighted:eta=0.5,max_power_w=400"
    )
    with pytest.raises(ConfigurationError, match="power limit"):
        summarize([header(meter=None), candidate("a", 1e-3)], "weighted:eta=0.5")


def test_ties_are_kept() -> None:
    task = only_task(
        [
            header(),
            candidate("a", 1.00e-3, 0.1500, relative_stderr=0.01),
            candidate("b", 1.01e-3, 0.1499, relative_stderr=0.01),
            candidate("c", 1.02e-3, 0.3000),
        ]
    )
    assert task.best is not None
    assert task.best.key == "a"
    assert [kernel.key for kernel in task.ties] == ["b"]


def test_finalists_decide() -> None:
    records = [
        header(),
        candidate("a", 1.00e-3, 0.2),
        candidate("b", 1.01e-3, 0.1),
        final("a", 1.00e-3, 0.20, 2),
        final("b", 1.01e-3, 0.22, 2),
    ]
    task = only_task(records)
    assert task.best is not None
    assert (task.best.key, task.best.energy_j, task.finalists) == ("a", 0.20, 2)
    assert task.energy_measurements == 2
    assert task.device_s == pytest.approx(12.0)


def test_an_energy_that_could_not_be_measured_is_told() -> None:
    records = [
        header(),
        candidate("a", 1e-3, error="energy: the sensor did not move"),
        candidate("b", 1e-3, 0.1, workload="w1"),
    ]
    task = summarize(records).tasks[0]
    assert (task.candidates, task.failed, task.best) == (1, 0, None)
    assert task.reason == (
        "1 of 1 candidates ran, but no energy was measured; most often: energy: the sensor did not move"
    )


def test_a_task_without_a_schedule_is_no_candidate() -> None:
    task = only_task(
        [
            header(),
            TaskRecord(task="t", workload="w0"),
            candidate("", None, error="schedule: no loop"),
        ]
    )
    assert (task.candidates, task.failed) == (0, 0)
    assert task.reason == "schedule: no loop"


def test_a_task_that_was_not_tried() -> None:
    task = only_task([header(), TaskRecord(task="t", workload="w0")])
    assert task.reason == "no candidate was tried; TVM's logs in the work directory may say why"
    assert summarize([header(), TaskRecord(task="t", workload="w0")]).totals is None


def test_long_reasons_are_cut_to_their_first_line() -> None:
    task = only_task([header(), candidate("a", None, error=" build: " + "x" * 500 + "\nmore")])
    (reason,) = task.errors
    assert len(reason) == 160
    assert reason.startswith("build: xxx")
    assert reason.endswith("…")


def test_tasks_without_a_task_line_are_named_after_their_workload() -> None:
    task = only_task([header(), candidate("a", 1e-3, 0.2)])
    assert (task.name, task.weight) == ("w0", 1.0)


# -- without energies ------------------------------------------------------------------------------

NO_ENERGY = [
    header("cpu", "latency", simulated=False, meter=None),
    candidate("a", 1e-3),
    candidate("b", 2e-3),
]


def test_latency_needs_no_energies() -> None:
    summary = summarize(NO_ENERGY)
    (task,) = summary.tasks
    assert not summary.simulated
    assert task.best is not None
    assert (task.best.key, task.best.energy_j, task.best.power_w) == ("a", None, None)
    assert not task.best.measured
    assert task.saved_fraction is None
    assert summary.totals is not None
    assert (summary.totals.best_energy_j, summary.totals.saved_fraction) == (None, None)


def test_an_energy_objective_needs_energies() -> None:
    with pytest.raises(ConfigurationError, match=r"had no meter.*--objective latency"):
        summarize(NO_ENERGY, "edp")
    with pytest.raises(ConfigurationError, match="every energy measurement failed"):
        summarize([header(), candidate("a", 1e-3, error="energy: no")])


def test_a_run_whose_builds_all_failed_is_a_result_too() -> None:
    summary = summarize([header(), candidate("a", None, error="build: no")])
    assert summary.totals is None
    assert summary.tasks[0].reason == "none of 1 candidates ran; most often: build: no"


# -- continued runs --------------------------------------------------------------------------------


def test_a_continued_run_counts_nothing_twice() -> None:
    first = [header(), candidate("a", 1e-3, 0.2), candidate("b", None, error="build: no")]
    again = [header(), candidate("a", 1e-3), candidate("b", None, error="build: no")]
    summary = summarize([*first, *again])
    (task,) = summary.tasks
    assert summary.runs == 2
    assert (task.candidates, task.failed, task.energy_measurements) == (2, 1, 1)


def test_the_last_run_decides_objective_and_weight() -> None:
    one = TaskRecord(task="t", workload="w0", weight=1)
    two = TaskRecord(task="t", workload="w0", weight=2)
    runs = [header(), one, candidate("a", 1e-3, 0.2), header(objective="edp"), two]
    summary = summarize(runs)
    assert summary.objective == "edp"
    assert summary.tasks[0].weight == 2


def test_energies_of_another_plan_are_set_aside() -> None:
    other = {"window_s": 9.0}
    old = [header(), candidate("a", 1e-3, 0.2), final("a", 1e-3, 0.2, 1)]
    new = [header(plan=other), candidate("b", 1e-3, 0.3)]
    records, left_out = comparable([*old, *new], new[0])
    assert left_out == 2
    assert [record.kind for record in records] == ["header", "candidate", "header", "candidate"]
    summary = summarize([*old, *new])
    (task,) = summary.tasks
    assert summary.set_aside == 2
    assert task.best is not None
    assert task.best.key == "b"
    assert task.energy_measurements == 1


def test_runs_of_different_devices_are_not_mixed() -> None:
    with pytest.raises(WorkDirError, match=r"sim:a100.*and.*sim:h200"):
        summarize([header(), header("sim:h200"), candidate("a", 1e-3, 0.2)])


def test_anything_simulated_makes_the_run_simulated() -> None:
    real = header("NVIDIA H200", simulated=False)
    assert not summarize([real, candidate("a", 1e-3, 0.2, simulated=False)]).simulated
    assert summarize([real, candidate("a", 1e-3, 0.2, simulated=True)]).simulated


# -- directories -----------------------------------------------------------------------------------


def test_a_directory_and_its_file_say_the_same(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    expected = summarize(two_tasks())
    assert summarize(tmp_path) == expected
    assert summarize(str(tmp_path)) == expected
    assert summarize(path) == expected


def test_nothing_is_written_not_even_a_torn_tail_mended(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    path.write_text(path.read_text() + '{"kind": "candi')
    tmp_path.chmod(0o500)
    before = snapshot(tmp_path)
    try:
        assert summarize(tmp_path, "edp") == summarize(two_tasks(), "edp")
    finally:
        tmp_path.chmod(0o700)
    assert snapshot(tmp_path) == before


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing does not exist"):
        summarize(tmp_path / "missing")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(WorkDirError, match=f"no {FILE_NAME}"):
        summarize(tmp_path)


@pytest.mark.parametrize("text", ["", '{"kind": "hea'])
def test_a_log_without_a_record(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(WorkDirError, match="holds no records yet"):
        summarize(tmp_path)


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    lines = path.read_text().splitlines()
    lines[5] = '{"kind": "candidate", "latency_s": NaN}'
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordFormatError, match=f"{path}, line 6: .*NaN"):
        summarize(tmp_path)


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(WorkDirError, match="cannot read"):
        summarize(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks()).chmod(0)
    with pytest.raises(WorkDirError, match="cannot read"):
        summarize(tmp_path)


def test_an_unknown_objective(tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    with pytest.raises(ConfigurationError, match="unknown objective 'speed'"):
        summarize(tmp_path, "speed")


def test_rounds_do_not_count_as_candidates() -> None:
    assert only_task([header(), candidate("a", 1e-3, 0.2), round_record()]).candidates == 1
