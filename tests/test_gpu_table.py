"""The table of one GPU's kernels: interrupted, continued, read back and replayed, on a simulated device."""

from __future__ import annotations

import csv
import json
import lzma
import os
import signal
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_policy
import gpu_table

from tvm_energy.errors import RecordFormatError, TvmEnergyError
from tvm_energy.progress import SilentProgress
from tvm_energy.records import FILE_NAME, CandidateRecord, RoundRecord, read_records

SPEC = "matmul:m=64,n=64,k=64"
EFFORT = gpu_table.Effort(kernels=8, per_round=4, population=16, seed=3)
ARGUMENTS = [
    *("--device", "sim:a100", "--workloads", SPEC, "--kernels", "8", "--json"),
    *("--trials-per-round", "4", "--population", "16", "--seed", "4"),
]


class Impatient(SilentProgress):
    """Presses Ctrl-C in the first round, as a user would."""

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def candidates(work_dir: Path) -> list[CandidateRecord]:
    records = read_records(work_dir / gpu_table.folder(SPEC) / FILE_NAME)
    return [record for record in records if isinstance(record, CandidateRecord)]


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu") / "work"


@pytest.fixture(scope="module")
def first(work_dir: Path) -> list[CandidateRecord]:
    """What is on record after a run that was interrupted in its first round."""
    from tvm_energy.meta_schedule.device import open_device

    with closing(open_device("sim:a100")) as device:
        functions = gpu_table.primfuncs({SPEC: SPEC})
        stopped = gpu_table.collect(device, functions, EFFORT, work_dir, None, Impatient())
    assert stopped == "interrupted"
    return candidates(work_dir)


@pytest.fixture(scope="module")
def printed(work_dir: Path, first: list[CandidateRecord]) -> dict[str, Any]:
    """What the continued run prints as its last line."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert gpu_table.main([*ARGUMENTS, "--work-dir", str(work_dir)]) == 0
    values: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return values


def test_a_continued_run_measures_nothing_twice(
    work_dir: Path, first: list[CandidateRecord], printed: dict[str, Any]
) -> None:
    every = candidates(work_dir)
    assert 0 < len(first) < len(every)
    assert every[: len(first)] == first
    times = Counter(record.key for record in every if record.measured is not None)
    assert set(times.values()) == {1}
    assert (printed["kernels"], printed["measured"]) == (len(every), len(times))
    assert printed["measured"] >= 8
    assert printed["stopped"] is None


def test_the_table_holds_what_was_measured(work_dir: Path, printed: dict[str, Any]) -> None:
    path = Path(printed["path"])
    with lzma.open(path / "table.csv.xz", "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    measured = {r.key: r for r in candidates(work_dir) if r.measured is not None}
    assert [row["key"] for row in rows] == list(measured)
    for row in rows:
        record = measured[row["key"]]
        assert record.measured is not None
        assert float(row["latency_s"]) == record.latency_s
        assert float(row["energy_j"]) == record.measured.energy_j
        assert float(row["power_w"]) == pytest.approx(record.measured.power_w)
        assert (row["spec"], row["simulated"]) == (SPEC, "True")
        assert gpu_table.stock_key([0, [json.loads(row["trace"])]]) == row["key"]
    assert [file.name for file in sorted(path.iterdir())] == [
        *("about.json", "pools.npz", "table.csv.xz"),
    ]
    about = json.loads((path / "about.json").read_text())
    assert about["simulated"] is printed["simulated"] is True
    assert about["device"] == printed["device"] == "sim:a100"
    assert "uuid" not in (path / "about.json").read_text().lower()


def test_the_table_is_replayed(work_dir: Path, printed: dict[str, Any]) -> None:
    device, simulated, pools = bench_policy.table_pools(Path(printed["path"]), None)
    assert (device, simulated, [each.name for each in pools]) == ("sim:a100", True, [SPEC])
    records = [r for r in candidates(work_dir) if r.measured is not None]
    np.testing.assert_array_equal(pools[0].latency_s, [r.latency_s for r in records])
    assert bench_policy.play(pools[0], "all", seed=0).measured_share > 0
    assert bench_policy.play(pools[0], "none", seed=0).measured_share == 0


def test_a_measured_table_says_so(
    printed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The name and the word come from about.json, not from how the device is spelt."""
    source = Path(printed["path"])
    about = json.loads((source / "about.json").read_text()) | {"simulated": False}
    (tmp_path / "about.json").write_text(json.dumps(about))
    (tmp_path / "pools.npz").write_bytes((source / "pools.npz").read_bytes())
    monkeypatch.setattr(
        sys, "argv", ["bench_policy.py", "--table", str(tmp_path), "--quick", "--policies", "all"]
    )
    bench_policy.main()
    shown = capsys.readouterr()
    assert "[measured, replayed]" in shown.err
    assert json.loads(shown.out)["sim:a100"]["simulated"] is False


def test_a_work_directory_of_another_device_is_refused(
    work_dir: Path, printed: dict[str, Any], capsys: Any
) -> None:
    arguments = [*ARGUMENTS, "--work-dir", str(work_dir), "--device", "sim:rtx4090"]
    assert gpu_table.main(arguments) == 1
    assert "belongs to device" in last_line(capsys)


def test_other_wrong_starts_are_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    arguments = [*ARGUMENTS, "--work-dir", str(tmp_path / "work")]
    assert gpu_table.main([*arguments, "--output", str(tmp_path / "file" / "x")]) == 1
    assert "choose another --output" in last_line(capsys)
    assert gpu_table.main([*arguments, "--workloads", "nosuch"]) == 2
    assert "nosuch" in last_line(capsys)
    assert gpu_table.main([*arguments, "--device", "sim:nosuch"]) == 2
    assert "nosuch" in last_line(capsys)
    for option, name in (("--population", "population"), ("--trials-per-round", "trial")):
        assert gpu_table.main([*arguments, option, "0"]) == 2
        assert name in last_line(capsys)


def test_a_device_without_a_meter_is_refused(tmp_path: Path) -> None:
    from tvm_energy.meta_schedule.device import open_device

    with closing(open_device("sim:a100")) as device:
        device.meter = None
        device.no_meter_reason = "no sensor"
        functions = gpu_table.primfuncs({SPEC: SPEC})
        with pytest.raises(TvmEnergyError, match="no sensor"):
            gpu_table.collect(device, functions, EFFORT, tmp_path, None, SilentProgress())


def test_time_that_is_over_ends_after_the_round(tmp_path: Path) -> None:
    """The run is stopped as by Ctrl-C, but is not said to be interrupted; what it measured is kept."""
    from tvm_energy.meta_schedule.device import open_device

    with closing(open_device("sim:a100")) as device:
        functions = gpu_table.primfuncs({SPEC: SPEC})
        stopped = gpu_table.collect(device, functions, EFFORT, tmp_path, 1e-4, SilentProgress())
    assert stopped == "time is over"
    assert {record.round for record in candidates(tmp_path)} == {0}


def test_a_broken_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordFormatError, match=r"no table of gpu_table\.py"):
        bench_policy.table_pools(tmp_path, None)
    (tmp_path / "about.json").write_text('{"device": "x", "simulated": true}')
    (tmp_path / "pools.npz").write_bytes(b"PK no zip")
    with pytest.raises(RecordFormatError, match=r"no table of gpu_table\.py"):
        bench_policy.table_pools(tmp_path, None)


def last_line(capsys: Any) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in line for line in lines)
    return str(lines[-1])
