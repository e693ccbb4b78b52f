"""A round trip on this CPU: tune, kill, resume, export, and deploy where tvm_energy does not exist."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tvm_energy.errors import ConfigurationError, RecordFormatError, WorkDirError
from tvm_energy.manifest import read_manifest
from tvm_energy.meta_schedule.export import export, schedule_texts
from tvm_energy.meta_schedule.workloads import parse_workload
from tvm_energy.records import FILE_NAME, CandidateRecord, read_records
from tvm_energy.replay import summarize

pytestmark = pytest.mark.tuning

SPEC = "matmul:m=48,n=40,k=56"
TARGET = json.dumps({"kind": "llvm", "num-cores": 2})

#: What a user runs where only apache-tvm is installed.
PLAIN_TVM = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tvm_energy":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
try:
    import tvm_energy
except ModuleNotFoundError:
    pass
else:
    sys.exit("tvm_energy can be imported; the test proves nothing")

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

folder, data = sys.argv[1:]
target = tvm.target.Target(json.loads(open(folder + "/manifest.json").read())["device"]["target"])
database = ms.database.JSONDatabase(work_dir=folder)
(record,) = database.get_all_tuning_records()
arrays = np.load(data)
schedule = ms.tir_integration.compile_tir(database, record.workload.mod, target)
assert schedule is not None
kernel = tvm.compile(schedule.mod, target=target)
output = tvm.runtime.tensor(np.zeros_like(arrays["expected"]))
kernel(tvm.runtime.tensor(arrays["a"]), tvm.runtime.tensor(arrays["b"]), output)
np.testing.assert_allclose(output.numpy(), arrays["expected"], rtol=1e-4, atol=1e-4)
print(json.dumps({"trace": str(schedule.trace), "run_secs": [float(s) for s in record.run_secs]}))
assert not any(name.partition(".")[0] == "tvm_energy" for name in sys.modules)
"""


def tune(work_dir: Path, trials: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tvm_energy.cli", "tune", "--workload", SPEC),
            *("--device", "cpu", "--target", TARGET, "--objective", "latency", "--seed", "1"),
            *("--trials", str(trials), "--trials-per-round", "4", "--population", "16"),
            *("--work-dir", str(work_dir), "--quiet"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def candidates(work_dir: Path) -> list[CandidateRecord]:
    file = work_dir / FILE_NAME
    records = list(read_records(file)) if file.exists() else []
    return [record for record in records if isinstance(record, CandidateRecord)]


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory whose first run was killed with SIGKILL in the middle."""
    work_dir = tmp_path_factory.mktemp("run")
    first = tune(work_dir, 4000)
    deadline = time.monotonic() + 120
    while not candidates(work_dir) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    before = candidates(work_dir)
    assert before
    second = tune(work_dir, len(before) + 4)
    _, errors = second.communicate()
    assert second.returncode == 0, errors
    after = candidates(work_dir)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert max(Counter(record.key for record in after if record.key).values()) == 1
    return work_dir


@pytest.fixture(scope="module")
def exported(killed_and_resumed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "out"
    export(killed_and_resumed, folder)
    return folder


def test_plain_tvm_deploys_the_export_of_a_killed_run(
    killed_and_resumed: Path, exported: Path, tmp_path: Path
) -> None:
    workload = parse_workload(SPEC)
    a, b = workload.random_inputs(seed=3)
    np.savez(tmp_path / "data.npz", a=a, b=b, expected=workload.reference([a, b])[0])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_TVM, str(exported), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    deployed = json.loads(done.stdout.splitlines()[-1])
    (task,) = summarize(killed_and_resumed).tasks
    assert task.best is not None
    assert np.mean(deployed["run_secs"]) == pytest.approx(task.best.latency_s, rel=1e-9)
    texts = schedule_texts(killed_and_resumed, {task.workload: task.best.key})
    assert deployed["trace"] == texts[task.workload]


def test_the_manifest_tells_what_was_chosen_and_where_it_stands(
    killed_and_resumed: Path, exported: Path
) -> None:
    manifest = read_manifest(exported)
    assert manifest is not None
    summary = summarize(killed_and_resumed)
    (task,) = summary.tasks
    (kernel,) = manifest["kernels"]
    assert task.best is not None
    assert (kernel["task"], kernel["key"]) == (task.name, task.best.key)
    assert task.name.startswith(SPEC)
    assert kernel["latency_s"] == task.best.latency_s
    assert (manifest["objective"], manifest["simulated"]) == ("latency", False)
    assert manifest["device"] == summary.header.device
    assert manifest["versions"]["apache-tvm"]
    where = kernel["from"]["energy_record"]
    line = (killed_and_resumed / where["file"]).read_text().splitlines()[where["line"] - 1]
    assert json.loads(line)["key"] == task.best.key
    where = kernel["from"]["tuning_record"]
    line = (killed_and_resumed / where["file"]).read_text().splitlines()[where["line"] - 1]
    copied = (exported / where["file"]).read_text().splitlines()
    assert [json.loads(item)[1] for item in copied] == [json.loads(line)[1]]


def test_every_kernel_on_record_is_found_in_the_stock_file(killed_and_resumed: Path) -> None:
    # Layout rewriting leaves a mark that TVM saves as 1 and makes as True; both are one kernel.
    ran = [record for record in candidates(killed_and_resumed) if record.latency_s is not None]
    for record in ran:
        assert schedule_texts(killed_and_resumed, {record.workload: record.key})
    stock = (killed_and_resumed / "database_tuning_record.json").read_text()
    assert "layout_rewrite_preproc" in stock


def test_the_log_is_only_read(killed_and_resumed: Path, tmp_path: Path) -> None:
    source = tmp_path / "read only"
    shutil.copytree(killed_and_resumed, source)
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    source.chmod(0o555)
    export(source, tmp_path / "to")
    source.chmod(0o755)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_an_earlier_export_is_replaced_only_when_asked(
    killed_and_resumed: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    export(killed_and_resumed, to)
    with pytest.raises(ConfigurationError, match="earlier export; give --force"):
        export(killed_and_resumed, to)
    export(killed_and_resumed, to, replace=True)
    (to / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigurationError, match=r"'thesis\.tex'; it is not replaced"):
        export(killed_and_resumed, to, replace=True)
    assert (to / "thesis.tex").exists()
    assert [item.name for item in tmp_path.iterdir()] == ["to"]


def test_folders_that_must_not_be_written_to(killed_and_resumed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for to, message in [
        (killed_and_resumed, "work directory itself"),
        (killed_and_resumed.parent, "work directory itself"),
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "link", "is not a folder"),
        (tmp_path / "full", "no earlier export"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            export(killed_and_resumed, to)
    with pytest.raises(ConfigurationError, match="does not exist"):
        export(tmp_path / "nothing", tmp_path / "to")


def test_a_schedule_that_is_gone_or_damaged_is_named(
    killed_and_resumed: Path, tmp_path: Path
) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(killed_and_resumed, source)
    records = source / "database_tuning_record.json"
    lines = records.read_text().splitlines()
    records.write_text("")
    with pytest.raises(WorkDirError, match=r"is not in .*tuning_record"):
        export(source, tmp_path / "to")
    records.write_text('[0,["nonsense",[1.0],{},[]]]\n')
    with pytest.raises(RecordFormatError, match="line 1: TVM cannot read"):
        export(source, tmp_path / "to")
    records.write_text(lines[0] + "\n[99,[[],[1.0],{},[]]]\n")
    with pytest.raises(RecordFormatError, match="line 2: names workload 99"):
        export(source, tmp_path / "to")
    records.unlink()
    with pytest.raises(WorkDirError, match="No such file"):
        export(source, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_foreign_and_newer_manifests_are_refused(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    for text, message in [
        ("{", "not valid JSON"),
        ('{"name": "a web page"}', "was not written by"),
        ('{"format": "tvm-energy-export", "version": 2}', "version 2 is not supported"),
    ]:
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(RecordFormatError, match=message):
            read_manifest(tmp_path)
