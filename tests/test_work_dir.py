from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from tvm_energy.errors import RecordFormatError, WorkDirError
from tvm_energy.records import FILE_NAME, Header, RecordLog
from tvm_energy.work_dir import TUNING_RECORD_FILE, WORKLOAD_FILE, load, locked_work_dir


def header(uuid: str = "sim:a100") -> Header:
    return Header(
        device={"name": "a GPU", "uuid": uuid},
        meter=None,
        objective="latency",
        policy="none",
        plan={},
        versions={},
        seed=1,
        created=0.0,
    )


def hold(path: Path, ready, release) -> None:
    with locked_work_dir(path):
        ready.set()
        release.wait(30)


def test_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, release))
    process.start()
    try:
        assert ready.wait(30)
        with (
            pytest.raises(WorkDirError, match=f"in use by another.*{process.pid}"),
            locked_work_dir(tmp_path),
        ):
            pass
    finally:
        release.set()
        process.join()
    with locked_work_dir(tmp_path):
        pass


def test_lock_of_a_killed_process_does_not_stay(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready, release))
    process.start()
    assert ready.wait(30)
    process.kill()
    process.join()
    with locked_work_dir(tmp_path):
        pass


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("")
    with pytest.raises(WorkDirError, match="is a file"), locked_work_dir(file):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkDirError, match="cannot write"), locked_work_dir(tmp_path / "out"):
        pass


def test_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(WorkDirError, match="cannot write"),
        locked_work_dir(tmp_path / "file" / "x"),
    ):
        pass


def test_records_of_another_device_are_refused(tmp_path: Path) -> None:
    with RecordLog(tmp_path) as log:
        log.append(header("sim:rtx4090"))
    with pytest.raises(WorkDirError, match=r"sim:rtx4090.*not to sim:a100"):
        load(tmp_path, "sim:a100")
    assert len(load(tmp_path, "sim:rtx4090")) == 1


def test_torn_last_lines_are_mended(tmp_path: Path) -> None:
    with RecordLog(tmp_path) as log:
        log.append(header())
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"kind": "candi')
    (tmp_path / WORKLOAD_FILE).write_text('["1", "x"]\n')
    (tmp_path / TUNING_RECORD_FILE).write_text("[0, [[], [0.1], {}, []]]\n[0, [[], [0.")
    assert len(load(tmp_path, "sim:a100")) == 1
    assert (tmp_path / TUNING_RECORD_FILE).read_text() == "[0, [[], [0.1], {}, []]]\n"
    assert (tmp_path / FILE_NAME).read_text().count("\n") == 1


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / WORKLOAD_FILE).write_text('["1", "x"]')
    load(tmp_path, "sim:a100")
    assert (tmp_path / WORKLOAD_FILE).read_text() == '["1", "x"]\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (WORKLOAD_FILE, '["1", "x"]\n{broken\n["2", "y"]\n', "line 2: not valid JSON"),
        (WORKLOAD_FILE, '{"a": 1}\n', "line 1: not a workload"),
        (TUNING_RECORD_FILE, "[3, [[], [0.1]]]\n", "line 1: names workload 3"),
        (TUNING_RECORD_FILE, "[" * 100_000 + "\n", "line 1: not valid JSON"),
        (FILE_NAME, json.dumps({"kind": "round"}) + "\n", "line 1"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecordFormatError, match=f"{name}, {message}"):
        load(tmp_path, "sim:a100")
