from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_examples import candidate, final, header, round_record, two_tasks, write_log

import tvm_energy
from tvm_energy.ansor_log import LOG_FILE, is_ansor_only, names_of_line, read_log
from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.json_lines import LONGEST_LINE, read_lines, repair_tail
from tvm_energy.logs.convert import convert
from tvm_energy.logs.load import Log, comparable, differences, load_log
from tvm_energy.logs.merge import merge
from tvm_energy.logs.prune import prune
from tvm_energy.logs.stat import stat
from tvm_energy.logs.t4 import read_t4
from tvm_energy.logs.table import ALL_COLUMNS, record_of, row_of
from tvm_energy.logs.verify import Counts, verify
from tvm_energy.records import (
    FILE_NAME,
    KINDS,
    CandidateRecord,
    Record,
    RecordLog,
    TaskRecord,
    read_records,
    rules_of,
)
from tvm_energy.replay import summarize, summarize_together
from tvm_energy.work_dir import TUNING_RECORD_FILE, WORKLOAD_FILE, Problem, stock_key

GOLDEN = Path(__file__).parent / "golden"


def problems(path: Path) -> tuple[list[Problem], Counts]:
    counts = Counts()
    return list(verify(path, counts)), counts


def lines(path: Path) -> list[str]:
    return (path / FILE_NAME if path.is_dir() else path).read_text().splitlines()


# -- verify ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_golden_logs_are_without_problems(version: int) -> None:
    found, counts = problems(GOLDEN / f"records_v{version}.json")
    assert found == []
    assert dict(counts.lines) == {"header": 1, "task": 1, "candidate": 32, "round": 4, "final": 4}


def test_every_broken_line_is_named_with_its_reason(tmp_path: Path) -> None:
    path = write_log(tmp_path, [header(), candidate("a", 1e-3), candidate("b", 1e-3)])
    text = lines(path)
    text[1] = '{"kind": "candidate", "latency_s": NaN}'
    text.insert(2, "[1, 2]")
    text.insert(4, '{"kind": "header", "schema": 99}')
    text.append("\x00\x01 binary junk")
    text.append('{"kind": "candi')
    path.write_text("\n".join(text))
    found, counts = problems(tmp_path)
    assert [(p.line, p.warning) for p in found] == [
        (2, False),
        (3, False),
        (5, False),
        (6, False),
        (7, True),
    ]
    for problem, reason in zip(
        found, ("NaN", "JSON object", "newer than this", "not valid JSON", "torn"), strict=True
    ):
        assert reason in problem.reason
        assert str(path) in str(problem)
    assert (counts.errors, counts.warnings, counts.lines["candidate"]) == (4, 1, 1)


def test_lines_that_contradict_one_another_are_told(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        [
            header(),
            candidate("a", 1e-3, 0.2, simulated=False),
            round_record(candidates=2, measured=1),
            final("z", 1e-3, 0.2, 1),
            header("sim:h200"),
        ],
    )
    found, counts = problems(tmp_path)
    assert [problem.line for problem in found] == [2, 3, 4, 5]
    for problem, reason in zip(
        found, ("real", "hold 1 and 1", "kernel z", "sim:h200"), strict=True
    ):
        assert reason in problem.reason
    assert (counts.errors, counts.warnings) == (1, 3)


def test_stock_files_are_checked_too(tmp_path: Path) -> None:
    write_log(tmp_path, [header(), candidate("a", 1e-3)])
    (tmp_path / WORKLOAD_FILE).write_text('["123", "module"]\n{"a": 1}\n')
    (tmp_path / TUNING_RECORD_FILE).write_text("[7, [[], [1.0], {}, []]]\nnonsense\n")
    found, _ = problems(tmp_path)
    places = [(problem.path.name, problem.line) for problem in found]
    assert places == [
        (WORKLOAD_FILE, 2),
        (TUNING_RECORD_FILE, 1),
        (TUNING_RECORD_FILE, 2),
        (FILE_NAME, 2),
    ]


def test_an_empty_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("")
    found, _ = problems(tmp_path)
    assert [problem.reason for problem in found] == ["holds no records"]


# -- load and stat ---------------------------------------------------------------------------------


def test_load_log_gives_what_was_written(tmp_path: Path) -> None:
    records = two_tasks()
    write_log(tmp_path, records)
    log = tvm_energy.load_log(tmp_path)
    assert list(log.records()) == records == list(log.records())
    assert log.header == records[0]
    assert [task.task for task in log.tasks().values()] == [
        "fused_conv2d_add_relu",
        "matmul",
        "broken",
    ]
    assert [record.key for record in log.candidates()] == ["a", "b", "c", "d", "e", *"pqxy"]
    assert [record.workload for record in log.rounds()] == ["w0", "w1"]
    assert list(log.finals()) == []
    assert summarize(log) == summarize(tmp_path)


def test_load_log_checks_every_line(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    path.write_text(path.read_text().replace('"latency_s": 0.0012', '"latency_s": -1'))
    with pytest.raises(RecordFormatError, match="line 7: latency_s"):
        load_log(tmp_path)


def test_a_data_frame_has_units_types_and_names() -> None:
    pytest.importorskip("pandas")
    frame = load_log(GOLDEN / "records_v2.json").to_dataframe()
    assert len(frame) == 32
    assert frame["name"].iloc[0].startswith("matmul:")
    assert frame["measured.energy_j"].notna().sum() == 16
    assert frame["measured.energy_j"].dtype == "float64"
    assert frame["round"].dtype == "Int64"
    rounds = load_log(GOLDEN / "records_v2.json").to_dataframe("round")
    assert list(rounds["measured.count"]) == [1, 3, 6, 6]
    with pytest.raises(ConfigurationError, match="unknown kind 'kernels'"):
        load_log(GOLDEN / "records_v2.json").to_dataframe("kernels")


def test_stat_counts_by_run_and_task(tmp_path: Path) -> None:
    write_log(tmp_path, [*two_tasks(), header(plan={"window_s": 3.0}), final("a", 1e-3, 0.2, 4)])
    result = stat(Log.of(tmp_path))
    assert [dict(run.lines) for run in result.runs] == [
        {"task": 3, "candidate": 9, "round": 2},
        {"final": 1},
    ]
    assert result.runs[0].differs == ["window_s (1.0, 3.0)"]
    assert result.runs[1].differs == []
    conv = result.tasks["w0"]
    assert (conv.candidates, conv.ran, conv.measured, conv.predicted, conv.finals) == (
        5,
        4,
        3,
        2,
        1,
    )
    assert conv.latency_s == (1.00e-3, 1.20e-3)
    assert conv.energy_j == (0.120, 0.200)


# -- what may be ranked together -------------------------------------------------------------------


def test_other_clocks_leave_out_latencies_too() -> None:
    old = dataclasses.replace(header(), clocks={"core_mhz": 900})
    new = dataclasses.replace(header(), clocks={"core_mhz": 1410})
    records = [old, candidate("a", 1e-3, 0.2), new, candidate("b", 2e-3, 0.3)]
    kept, left_out = comparable(records, new)
    assert left_out == 1
    assert [record.key for record in kept if isinstance(record, CandidateRecord)] == ["b"]
    (task,) = summarize(records).tasks
    assert task.best is not None
    assert task.best.key == "b"


def test_another_sensor_leaves_out_energies_only() -> None:
    old = header(meter={"meter": "nvml", "method": "power_integral", "scope": "gpu"})
    new = header(meter={"meter": "nvml", "method": "counter", "scope": "gpu"})
    kept, left_out = comparable([old, candidate("a", 1e-3, 0.2), new], new)
    assert left_out == 1
    assert isinstance(kept[1], CandidateRecord)
    assert (kept[1].latency_s, kept[1].measured) == (1e-3, None)


def test_a_setting_that_a_plan_does_not_name_has_its_default() -> None:
    assert differences(header(plan={"window_s": 0.3}), header(plan={"budget_s": 8.0})) == []
    assert differences(header(plan={"window_s": 0.3}), header(plan={"window_s": 2.0}))


def test_logs_of_one_kind_are_ranked_together_and_others_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write_log(one, [header(), candidate("a", 1e-3, 0.2)])
    write_log(other, [header(), candidate("b", 1e-3, 0.1)])
    (task,) = summarize_together([one, other]).tasks
    assert task.best is not None
    assert task.best.key == "b"
    for change in (header("sim:h200"), header(plan={"window_s": 9.0})):
        strange = tmp_path / str(change.device["uuid"]) / str(change.plan["window_s"])
        write_log(strange, [change, candidate("b", 1e-3, 0.1)])
        with pytest.raises(WorkDirError, match=r"cannot be ranked together.*(device|window_s)"):
            summarize_together([one, strange])


# -- merge -----------------------------------------------------------------------------------------


def test_merging_copies_keeps_every_line_once(tmp_path: Path) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    write_log(short, two_tasks()[:7])
    write_log(whole, two_tasks())
    result = merge([short, whole], tmp_path / "out")
    assert (result.runs, result.lines, result.duplicates) == (1, len(two_tasks()), 7)
    assert result.conflicts == []
    assert lines(tmp_path / "out") == lines(whole)


def test_runs_are_ordered_by_their_start(tmp_path: Path) -> None:
    later = dataclasses.replace(header(objective="edp"), created=2e9)
    write_log(tmp_path / "a", [later, candidate("b", 1e-3, 0.3)])
    write_log(tmp_path / "b", [header(), candidate("a", 1e-3, 0.2)])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    summary = summarize(tmp_path / "out")
    assert (summary.objective, summary.runs) == ("edp", 2)
    assert summary.tasks[0].candidates == 2


def test_contradictions_are_reported_with_file_and_line(tmp_path: Path) -> None:
    later = dataclasses.replace(header(), created=2e9)
    write_log(tmp_path / "a", [header(), candidate("a", 1e-3, 0.2), candidate("b", 1e-3, 0.2)])
    write_log(
        tmp_path / "b", [header(), candidate("a", 1e-3, 0.3), later, candidate("b", 1e-3, 0.5)]
    )
    result = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    first, second = result.conflicts
    assert (first.path, first.line, first.warning) == (tmp_path / "b" / FILE_NAME, 2, False)
    assert "line 2; left out" in first.reason
    assert (second.line, second.warning) == (4, True)
    assert "standard errors apart; both kept" in second.reason
    assert result.lines == 5


def test_the_content_counts_not_its_spelling(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a", [header(), candidate("a", 1e-3, 0.2)])
    (tmp_path / "b").mkdir()
    text = [json.dumps(json.loads(line), sort_keys=True, indent=None) for line in lines(path)]
    (tmp_path / "b" / FILE_NAME).write_text("\n".join(text))
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out").duplicates == 2


def test_blank_lines_before_a_run_lose_nothing(tmp_path: Path) -> None:
    later = dataclasses.replace(header(), created=2e9)
    path = write_log(tmp_path / "a", [header(), candidate("a", 1e-3), later, candidate("b", 1e-3)])
    text = lines(path)
    path.write_text("\n\n".join(["", *text, ""]))
    result = merge([tmp_path / "a", tmp_path / "a"], tmp_path / "out")
    assert lines(tmp_path / "out") == text
    assert (result.runs, result.lines, result.duplicates) == (2, 4, 4)


def test_merging_keeps_the_version_of_each_run(tmp_path: Path) -> None:
    sources = [GOLDEN / "records_v1.json", GOLDEN / "records_v2.json"]
    result = merge(sources, tmp_path / "out")
    assert sorted(lines(tmp_path / "out")) == sorted(
        line for source in sources for line in lines(source)
    )
    assert (result.runs, result.conflicts) == (2, [])
    assert problems(tmp_path / "out")[0] == []


def test_different_devices_are_not_merged(tmp_path: Path) -> None:
    write_log(tmp_path / "a", [header()])
    write_log(tmp_path / "b", [header("sim:h200")])
    with pytest.raises(WorkDirError, match=r"sim:a100.*sim:h200"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write_log(tmp_path / "a", two_tasks())
    before = path.read_bytes()
    for act in (
        lambda: merge([tmp_path / "a", tmp_path / "a"], tmp_path / "a"),
        lambda: prune(tmp_path / "a", tmp_path / "a"),
        lambda: convert(tmp_path / "a", tmp_path / "a"),
        lambda: convert(tmp_path / "a", path, to="csv"),
    ):
        with pytest.raises(ConfigurationError, match="exists already"):
            act()
    assert path.read_bytes() == before


def stock(path: Path, hashes: list[str], records: list[Any]) -> None:
    path.mkdir(exist_ok=True)
    (path / WORKLOAD_FILE).write_text(
        "".join(json.dumps([h, f"module {h}"]) + "\n" for h in hashes)
    )
    (path / TUNING_RECORD_FILE).write_text("".join(json.dumps(r) + "\n" for r in records))


def tuning_record(workload: int, number: int) -> list[Any]:
    split = ["Split", ["l1", "v2"], [1, 0], ["l3"]]
    return [workload, [[[split], [[number, 4]]], [1e-3], {"kind": "cuda"}, []]]


def test_stock_databases_are_joined_with_new_indices(tmp_path: Path) -> None:
    stock(tmp_path / "a", ["w0", "w1"], [tuning_record(0, 1), tuning_record(1, 2)])
    stock(tmp_path / "b", ["w1", "w2"], [tuning_record(0, 2), tuning_record(1, 3)])
    for name in "ab":
        write_log(tmp_path / name, [header(), candidate(name, 1e-3)])
    result = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (result.workloads, result.tuning_records) == (3, 3)
    out = [json.loads(line) for line in (tmp_path / "out" / TUNING_RECORD_FILE).open()]
    assert out == [tuning_record(0, 1), tuning_record(1, 2), tuning_record(2, 3)]
    assert [json.loads(x)[0] for x in (tmp_path / "out" / WORKLOAD_FILE).open()] == [
        "w0",
        "w1",
        "w2",
    ]


# -- prune -----------------------------------------------------------------------------------------

OBJECTIVES = ("latency", "energy", "edp", "ed2p", "energy:slack=0.05", "energy:slack=0.3")


@settings(deadline=None)
@given(
    kernels=st.lists(
        st.tuples(
            st.floats(1e-4, 1e-2), st.none() | st.floats(1e-3, 1.0), st.sampled_from([0.001, 0.1])
        ),
        min_size=1,
        max_size=25,
    ),
    finals=st.integers(0, 3),
    keep=st.integers(1, 3),
)
def test_a_pruned_log_ranks_like_the_whole_one(
    tmp_path_factory: pytest.TempPathFactory, kernels: list[Any], finals: int, keep: int
) -> None:
    path = tmp_path_factory.mktemp("prune")
    records: list[Record] = [header()]
    for index, (latency_s, energy_j, error) in enumerate(kernels):
        records.append(candidate(f"k{index}", latency_s, energy_j, relative_stderr=error))
    measured = [i for i, (_, energy_j, _) in enumerate(kernels) if energy_j is not None]
    for index in measured[:finals]:
        records.append(final(f"k{index}", kernels[index][0], kernels[index][1], len(kernels)))
    write_log(path / "whole", records)
    prune(path / "whole", path / "pruned", keep=keep)
    for objective in OBJECTIVES if measured else ["latency"]:
        whole, pruned = (summarize(path / name, objective).tasks[0] for name in ("whole", "pruned"))
        if objective != "energy:slack=0.3":  # not asked for when pruning
            assert (whole.best, whole.fastest) == (pruned.best, pruned.fastest)
            assert {k.key for k in whole.ties} == {k.key for k in pruned.ties}


def test_pruning_keeps_the_tuning_records_of_what_it_keeps(tmp_path: Path) -> None:
    rows = [tuning_record(0, number) for number in range(20)]
    keys = [stock_key(row) for row in rows]
    assert len(set(keys)) == 20
    stock(tmp_path / "a", ["unused", "w0"], [tuning_record(1, number) for number in range(20)])
    write_log(
        tmp_path / "a",
        [header()]
        + [candidate(key, 1e-3 * (1 + i), 0.1 * (1 + i)) for i, key in enumerate(keys)]
        + [round_record()],
    )
    result = prune(tmp_path / "a", tmp_path / "out", keep=3)
    assert (result.kernels, result.tuning_records, result.without_record) == (3, 3, 0)
    assert result.lines == 4
    out = [json.loads(line) for line in (tmp_path / "out" / TUNING_RECORD_FILE).open()]
    assert out == rows[:3]


# -- the log of legacy Ansor -----------------------------------------------------------------------


def program(number: int, latency_s: float = 1e-3, task: str = "matmul") -> str:
    """A line as stock Ansor writes it."""
    step = ["SP", 2, 0, 256, [number, 32, 4, 1], 1]
    task_part = [json.dumps([task, 256]), "cuda -arch=sm_80", [-1, 16, 64], "llvm", 0, []]
    record = {"i": [task_part, [[], [step]]], "r": [[latency_s], 0, 0.03, 1796100750], "v": "v0.6"}
    return json.dumps(record) + "\n"


def ansor_run(path: Path, numbers: Sequence[int], *, more: str = "") -> list[tuple[str, str]]:
    """A work directory of Ansor: workloads and keys of its kernels, the first the best."""
    lines = [program(number, 1e-3 * number) for number in numbers]
    names = [names_of_line(line) for line in lines]
    head = dataclasses.replace(header(), created=1.7e9 + numbers[0])
    records = [
        candidate(key, 1e-3 * number, 0.1 * number, workload=workload)
        for number, (workload, key) in zip(numbers, names, strict=True)
    ]
    write_log(path, [head, *records])
    (path / LOG_FILE).write_text("# a comment\n" + "".join(lines) + more)
    return names


def test_merging_joins_the_logs_of_ansor(tmp_path: Path) -> None:
    a, b = (ansor_run(tmp_path / name, n) for name, n in (("a", [1, 2]), ("b", [3, 4])))
    with (tmp_path / "b" / LOG_FILE).open("a") as file:
        file.write(program(1, 1e-3) + '{"i": [["torn')
    result = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (result.ansor_records, result.workloads, result.tuning_records) == (4, 0, 0)
    merged = [(w, key) for w, key, _ in read_log(tmp_path / "out" / LOG_FILE)]
    assert merged == a + b
    assert not (tmp_path / "out" / WORKLOAD_FILE).exists()
    counts = Counts()
    assert list(verify(tmp_path / "out", counts)) == []
    assert is_ansor_only(tmp_path / "out")


def test_pruning_keeps_the_lines_of_ansor_of_what_it_keeps(tmp_path: Path) -> None:
    names = ansor_run(tmp_path / "a", range(1, 21))
    result = prune(tmp_path / "a", tmp_path / "out", keep=3)
    assert (result.kernels, result.ansor_records, result.without_record) == (3, 3, 0)
    kept = list(read_log(tmp_path / "out" / LOG_FILE))
    assert [(w, key) for w, key, _ in kept] == names[:3]
    assert [line for _, _, line in kept] == [program(n, 1e-3 * n) for n in (1, 2, 3)]
    assert list(verify(tmp_path / "out", Counts())) == []


def test_verify_compares_records_and_the_log_of_ansor(tmp_path: Path) -> None:
    names = ansor_run(tmp_path, [1, 2], more='{"not": "Ansor"}\n' + program(9))
    lines = (tmp_path / LOG_FILE).read_text().splitlines(keepends=True)
    (tmp_path / LOG_FILE).write_text("".join(lines[:2] + lines[3:]))  # without the second kernel
    counts = Counts()
    found = [
        (p.path.name, p.line, p.warning, p.reason.split(": ")[-1]) for p in verify(tmp_path, counts)
    ]
    assert found == [
        (LOG_FILE, 3, False, "not a record of an Ansor log"),
        (FILE_NAME, 3, True, f"kernel {names[1][1]} is not in {LOG_FILE}"),
        (LOG_FILE, 4, True, "the program of no energy record"),
    ]
    for change in (
        lambda: merge([tmp_path, tmp_path], tmp_path / "out"),
        lambda: prune(tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(RecordFormatError, match=f"{LOG_FILE}, line 3: not a record"):
            change()
    assert not (tmp_path / "out").exists()


def test_a_directory_of_both_tuners_is_verified_by_both_files(tmp_path: Path) -> None:
    ansor_run(tmp_path, [1, 2])
    stock(tmp_path, ["w0"], [tuning_record(0, 1)])
    with RecordLog(tmp_path) as log:
        log.append(candidate("a", 1e-3, 0.1, workload="w0"))
        log.append(candidate("b", 1e-3, 0.1, workload="elsewhere"))
    reasons = [p.reason for p in verify(tmp_path, Counts())]
    assert reasons == [
        f"workload elsewhere is not in {WORKLOAD_FILE}",
        f"kernel b is not in {LOG_FILE}",
    ]
    result = prune(tmp_path, tmp_path / "out")
    assert (result.tuning_records, result.ansor_records) == (0, 2)


def test_a_log_of_ansor_outside_its_directory_is_not_read(tmp_path: Path) -> None:
    ansor_run(tmp_path / "a", [1])
    (tmp_path / "a" / LOG_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / "a" / LOG_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WorkDirError, match="leads out"):
        list(verify(tmp_path / "a", Counts()))


def test_a_key_from_the_file_is_that_of_the_search() -> None:
    """TVM writes the attributes of a split as numbers; in the trace they are booleans."""
    record = tuning_record(0, 1)
    assert stock_key(record) == "918ccb2c82e1bafb"
    for odd in ([0, []], [0, [None]], [0, [[]]], [0, [[["Split", 1, 2]]]], [0, [{"a": 1}]]):
        assert isinstance(stock_key(odd), str)


# -- other formats ---------------------------------------------------------------------------------

NAMES = ["=cmd|' /C calc'!A0", "@x", "'", "", "a\nb", 'say "hi", ok', "+1", "grün", "-", "\t"]


def odd_log() -> list[Record]:
    """Everything that a table could get wrong."""
    return [
        dataclasses.replace(header(), seed=2**64, clocks={"core_mhz": 1410}),
        *(TaskRecord(task=name, workload=f"w{i}", weight=0.1) for i, name in enumerate(NAMES)),
        candidate("a", 1 / 3, 0.1 + 0.2, predicted_energy_j=1e-9, workload="w0"),
        candidate("", None, error="schedule: " + "x" * 200_000),
        candidate("b", 5e-324 + 1e-15, 1e9, throttle_reasons=(), temperature_c=-4.0),
        round_record(chosen=()),
        round_record(chosen=("a", "=b"), policy_state={"k": [1, {"x": None}]}, snr_db=-3.25),
        final("a", 1e-3, 0.2, 3, idle_power_w=12.0),
    ]


@pytest.mark.parametrize("name", ["log.csv", "log.json", "log.parquet"])
def test_another_format_and_back_is_the_same_log(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    write_log(tmp_path / "in", odd_log())
    convert(tmp_path / "in", tmp_path / name)
    convert(tmp_path / name, tmp_path / "out")
    assert list(read_records(tmp_path / "out" / FILE_NAME)) == odd_log()


def test_a_spreadsheet_does_not_execute_a_name(tmp_path: Path) -> None:
    write_log(tmp_path / "in", odd_log())
    convert(tmp_path / "in", tmp_path / "log.csv")
    with (tmp_path / "log.csv").open(newline="") as file:
        csv.field_size_limit(LONGEST_LINE)
        rows = list(csv.DictReader(file))
    assert rows[1]["task"] == "'=cmd|' /C calc'!A0"
    for row in rows:
        for name, cell in row.items():
            numeric = name in ALL_COLUMNS and ALL_COLUMNS[name].type in ("number", "integer")
            assert numeric or not cell.startswith(("=", "+", "-", "@", "\t"))


def test_a_column_means_the_same_for_every_kind() -> None:
    for kind, cls in KINDS.items():
        for rule in rules_of(cls):
            if rule.name != "measured":
                assert ALL_COLUMNS[rule.name].type == rule.type, (kind, rule.name)


@pytest.mark.parametrize("record", odd_log(), ids=lambda record: record.kind)
def test_a_row_is_the_record(record: Record) -> None:
    assert record_of(row_of(record)) == record


def test_t4_has_what_kernel_tuner_reads(tmp_path: Path) -> None:
    write_log(tmp_path / "in", two_tasks())
    assert convert(tmp_path / "in", tmp_path / "t4.json") == 9
    values = json.loads((tmp_path / "t4.json").read_text())
    assert values["schema_version"] == "1.0.0"
    first = values["results"][0]
    assert {"configuration", "times", "invalidity", "correctness"} <= set(first)
    assert first["times"]["runtimes"] == [1.0]
    assert {"name": "energy", "value": 0.2, "unit": "J"} in first["measurements"]
    assert [result["invalidity"] for result in values["results"]] == [
        *["correct"] * 4,
        "compile",
        *["correct"] * 2,
        *["timeout"] * 2,
    ]


def kernel_tuner_results() -> dict[str, Any]:
    """As Kernel Tuner writes them (`store_output_file`)."""

    def result(block: int, invalidity: str, *measurements: Any) -> dict[str, Any]:
        return {
            "timestamp": "2023-12-21 10:44:42.236642+00:00",
            "configuration": {"block_size_x": block, "tile": 1},
            "times": {"compilation": 661.5, "benchmark": 393.9, "runtimes": [12.0, 12.2, 12.4]},
            "invalidity": invalidity,
            "correctness": 1,
            "measurements": [{"name": n, "value": v, "unit": u} for n, v, u in measurements],
            "objectives": ["time"],
        }

    return {
        "results": [
            result(16, "correct", ("time", 12.2, "ms"), ("nvml_energy", 1.5, "")),
            result(32, "compile", ("time", "CompilationFailedConfig", "ms")),
            result(64, "correct", ("GFLOP/s", 615.0, "")),
        ],
        "schema_version": "1.0.0",
    }


def test_results_of_kernel_tuner_become_a_log(tmp_path: Path) -> None:
    source = tmp_path / "convolution.json"
    source.write_text(json.dumps(kernel_tuner_results()))
    assert convert(source, tmp_path / "out", device="A4000") == 4
    summary = summarize(tmp_path / "out")
    assert (summary.device, summary.objective) == ("A4000", "energy")
    (task,) = summary.tasks
    assert (task.name, task.candidates, task.failed) == ("convolution", 3, 1)
    assert task.best is not None
    assert (task.best.latency_s, task.best.energy_j) == (pytest.approx(0.0122), 1.5)
    assert task.best.energy_stderr_j == pytest.approx(1.5 * 0.2 / 12.2 / 3**0.5)
    assert task.errors == {"build: did not compile": 1}
    measured = [
        r.measured for r in read_records(tmp_path / "out" / FILE_NAME) if r.kind == "candidate"
    ]
    assert "standard error" in measured[0].quality


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a T4 results file"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"results": [], "schema_version": "2.0.0"}', "'2.0.0' is not 1.x"),
        ('{"results": [7], "schema_version": "1.0.0"}', "result 1: has no configuration"),
        (
            '{"results": [{"configuration": {}, "invalidity": "correct"}], "schema_version": "1.0.0"}',
            "result 1: is correct, but",
        ),
        (
            '{"results": [{"tvm_energy": 3}], "tvm_energy": [], "schema_version": "1.0.0"}',
            "not one of",
        ),
    ],
)
def test_broken_t4_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t4.json"
    path.write_text(text)
    with pytest.raises(RecordFormatError, match=message):
        list(read_t4(path))


# -- hostile files and folders ---------------------------------------------------------------------


def verify_all(path: Path) -> list[Problem]:
    return problems(path)[0]


COMMANDS = [
    summarize,
    load_log,
    verify_all,
    lambda path: stat(Log.of(path)),
    lambda path: merge([path, path], path.parent / "merged"),
    lambda path: prune(path, path.parent / "pruned"),
    lambda path: convert(path, path.parent / "log.csv"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, command: Any) -> None:
    secret = write_log(tmp_path / "elsewhere", two_tasks())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / FILE_NAME).symlink_to(secret)
    with pytest.raises(WorkDirError, match="leads out of its directory"):
        command(tmp_path / "in")


def test_a_link_that_stays_inside_is_followed(tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    path.rename(tmp_path / "real.json")
    path.symlink_to("real.json")
    assert summarize(tmp_path) == summarize(two_tasks())


def test_a_run_does_not_write_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious, without a newline")
    (tmp_path / "in").mkdir()
    for target in (victim, tmp_path / "in" / FILE_NAME):  # the second is a ring
        link = tmp_path / "in" / FILE_NAME
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(WorkDirError, match="leads out"):
            write_log(tmp_path / "in", two_tasks())
    assert victim.read_text() == "precious, without a newline"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_does_not_hang(tmp_path: Path, command: Any) -> None:
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / FILE_NAME)
    with pytest.raises(WorkDirError, match="not a file"):
        command(tmp_path / "in")


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "candidate", "workload": "' + b"x" * 1_000_000 + b'"}',
        b"x" * (LONGEST_LINE + 10),
        b"[" * 1_000_000,
        b'{"kind": "header", "plan": ' + b'{"a":' * 500 + b"1" + b"}" * 501,
        b"9" * 100_000,
        b'{"kind": "task", "task": "\\ud800", "workload": "w", "weight": 1}',
        b'{"kind": "task", "task": "t", "workload": "w", "weight": 1e999}',
        b"\xff\xfe\x00",
    ],
    ids=["million", "too long", "deep", "deep plan", "digits", "surrogate", "1e999", "bytes"],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_line_is_named(tmp_path: Path, command: Any, line: bytes) -> None:
    path = write_log(tmp_path / "in", two_tasks())
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes().splitlines()[5] + b"\n")
    number = len(two_tasks()) + 1
    if command is verify_all:
        found = command(tmp_path / "in")
        assert [problem.line for problem in found if not problem.warning] == [number]
        message = str(found[-1])
    else:
        with pytest.raises(RecordFormatError, match=f"line {number}: ") as caught:
            command(tmp_path / "in")
        message = str(caught.value)
    assert len(message) < 1000


def test_a_long_line_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n" + b"x" * 300 + b"\n\n2\n" + b"y" * 300)
    found = [(number, len(line)) for number, line in read_lines(path, 10)]
    assert found == [(1, 2), (2, 12), (4, 2), (5, 11)]


def test_repair_reads_the_end_of_the_file_alone(tmp_path: Path) -> None:
    """Ten gigabytes with a hole in them, and a torn line."""
    path = tmp_path / FILE_NAME
    with path.open("wb") as file:
        file.seek(10 * 2**30)
        file.write(b'\n{"a": 1}\n{"b"')
    assert repair_tail(path)
    assert path.stat().st_size == 10 * 2**30 + 10
    with path.open("r+b") as file:
        file.truncate(5 * 2**20)
    with pytest.raises(RecordFormatError, match="not a log of ours"):
        repair_tail(path)
    assert path.stat().st_size == 5 * 2**20


@settings(deadline=None)
@given(data=st.binary(max_size=300), where=st.integers(0, 5000), cut=st.integers(0, 300))
def test_a_damaged_golden_log_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, where: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    good = (GOLDEN / "records_v2.json").read_bytes()[:6000]
    (folder / FILE_NAME).write_bytes(good[:where] + data + good[where + cut :])
    list(verify(folder, Counts()))
    try:
        summary = summarize(folder)
    except (RecordFormatError, WorkDirError, ConfigurationError):
        return
    assert summary.runs >= 1


def test_the_benchmark_tells_records_seconds_and_memory(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, repository / "scripts" / "bench_log.py", "--records", "3000", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["records"] == 3000
    assert values["seconds"] > 0
    assert values["peak_mb"] > 10
