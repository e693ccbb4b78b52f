from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from log_examples import candidate, header, round_record, two_tasks, write_log
from rich.console import Console

from tvm_energy.cli import main
from tvm_energy.cli.terminal import PlainProgress, TerminalProgress, make_progress
from tvm_energy.cli.tune import Source, Task, parse_input_shapes, select
from tvm_energy.errors import ConfigurationError
from tvm_energy.progress import SilentProgress
from tvm_energy.records import FILE_NAME
from tvm_energy.version import __version__
from tvm_energy.work_dir import locked_work_dir


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command in this process, with its file descriptors captured."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tvm-energy", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return Outcome(exit_.value.code if isinstance(exit_.value.code, int) else 0, out, err)

    return run


def command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tvm_energy.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


# -- in general ------------------------------------------------------------------------------------


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['tvm-energy', '--help']\nfrom tvm_energy.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('tvm', 'xgboost', 'pynvml', 'scipy', 'onnx') if name in sys.modules])"
    )
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"tvm-energy --help took {time.perf_counter() - start_s:.2f} s")
    assert done.stdout.splitlines()[-1] == "[]"
    for name in (
        "tune",
        "measure",
        "report",
        "replay",
        "compare",
        "export",
        "compile",
        "workloads",
        "doctor",
        "version",
        "clocks",
        "dvfs",
    ):
        assert re.search(rf"\b{name}\b", done.stdout)


@pytest.mark.parametrize(
    "name",
    [
        "tune",
        "measure",
        "report",
        "replay",
        "compare",
        "export",
        "compile",
        "workloads",
        "doctor",
        "version",
        "clocks show",
        "clocks restore",
        "dvfs fit",
        "dvfs sweep",
    ],
)
def test_every_command_has_help_and_json(cli: Cli, name: str) -> None:
    outcome = cli(*name.split(), "--help")
    assert outcome.code == 0
    assert "--json" in outcome.stdout
    assert "--debug" in outcome.stdout


def test_version(cli: Cli) -> None:
    assert cli("version").stdout == cli("--version").stdout == f"tvm-energy {__version__}\n"
    assert json.loads(cli("version", "--json").stdout) == {"version": __version__}


@pytest.mark.parametrize("arguments", [["nonsense"], ["report"], ["report", "a", "b"], ["--wrong"]])
def test_wrong_usage(cli: Cli, arguments: list[str]) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert outcome.stderr


def test_a_reader_that_leaves_early_is_no_error_message(tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    done = subprocess.run(
        f"{sys.executable} -m tvm_energy.cli report {shlex.quote(str(tmp_path))} | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_a_terminal_without_unicode_gets_its_report(tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    done = command("report", tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "2.00 ?s" in done.stdout


# -- report and replay -----------------------------------------------------------------------------


def test_report_prints_tables_on_stdout_alone(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    outcome = cli("report", tmp_path)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("SIMULATED DEVICE sim:a100: no real joules were measured\n")
    assert "25.0 %" in outcome.stdout
    assert f"\nResults are in {tmp_path}\n" in outcome.stdout


def test_report_json_is_one_object(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    outcome = cli("report", tmp_path, "--json")
    assert outcome.stdout.count("\n") == 1
    assert json.loads(outcome.stdout)["tasks"][0]["best"]["key"] == "b"


def test_replay_ranks_again(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks())
    values = json.loads(cli("replay", tmp_path, "--objective", "edp", "--json").stdout)
    assert (values["objective"], values["tasks"][0]["best"]["key"]) == ("edp", "c")
    assert "objective edp" in cli("replay", tmp_path, "-o", "edp").stdout
    assert json.loads(cli("replay", tmp_path, "--json").stdout)["tasks"][0]["best"]["key"] == "b"


def test_a_torn_tail_is_a_warning_on_stderr(cli: Cli, tmp_path: Path) -> None:
    path = write_log(tmp_path, two_tasks())
    path.write_text(path.read_text() + '{"kind": "candi')
    outcome = cli("report", tmp_path, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.stdout)["runs"] == 1
    assert re.search(rf"WARNING: .*{FILE_NAME}, line 16 is torn", outcome.stderr)


def _missing(folder: Path) -> Path:
    return folder / "missing"


def _corrupt(folder: Path) -> Path:
    path = write_log(folder, two_tasks())
    path.write_text(path.read_text().replace('"kind": "task"', '"kind": "tusk"', 1))
    return folder


def _two_devices(folder: Path) -> Path:
    write_log(folder, [header(), header("sim:h200"), candidate("a", 1e-3, 0.2)])
    return folder


def _no_energy(folder: Path) -> Path:
    write_log(folder, [header(meter=None), candidate("a", 1e-3)])
    return folder


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "message"),
    [
        (_missing, [], 2, "missing does not exist; give the --work-dir"),
        (lambda folder: folder, [], 1, "no run has started there"),
        (_corrupt, [], 1, f"{FILE_NAME}, line 2: unknown kind 'tusk'"),
        (_two_devices, [], 1, "mixes runs of different devices"),
        (_no_energy, [], 2, "--objective latency"),
        (_no_energy, ["-o", "speed"], 2, "unknown objective 'speed'; known are latency, energy"),
        (_no_energy, ["-o", "energy:slack=-1"], 2, "between 0 and 10"),
    ],
)
def test_errors_are_one_line_on_stderr(
    cli: Cli,
    tmp_path: Path,
    prepare: Callable[[Path], Path],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    outcome = cli("replay", prepare(tmp_path), *arguments, "--json")
    assert outcome.code == code
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("tvm-energy: error: ")
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = command("report", tmp_path / "missing", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "does not exist" in done.stderr


# -- workloads and doctor --------------------------------------------------------------------------


def test_workloads_are_listed_with_an_example_that_parses(cli: Cli) -> None:
    from tvm_energy.meta_schedule.workloads import WORKLOADS, parse_workload

    outcome = cli("workloads")
    assert outcome.code == 0
    for name in WORKLOADS:
        assert f"\n{name}: " in "\n" + outcome.stdout
    (example,) = re.findall(r"--workload (\S+)", outcome.stdout)
    assert parse_workload(example)
    listed = json.loads(cli("workloads", "--json").stdout)["workloads"]
    assert [item["name"] for item in listed] == list(WORKLOADS)
    assert all(item["parameters"] for item in listed)


def test_doctor_compares_the_sensors_of_a_simulated_gpu(cli: Cli) -> None:
    outcome = cli("doctor", "--self-test", "--device", "sim:h200", "--json")
    assert outcome.code == 0
    values = json.loads(outcome.stdout)
    assert [item["field"] for item in values["self_tests"]] == ["counter"]
    assert any("SIMULATED" in item["text"] for item in values["findings"])
    assert cli("doctor", "--device", "sim:h200").code == 2
    assert "not known" in cli("doctor", "--self-test", "--device", "sim:abc").stderr


def test_doctor(cli: Cli) -> None:
    outcome = cli("doctor")
    assert outcome.code == 0
    assert f"ok  tvm-energy: version {__version__}" in outcome.stdout
    values = json.loads(cli("doctor", "--json").stdout)
    assert values["ok"] is True
    assert {"severity", "topic", "text", "remedy"} == set(values["findings"][0])


def test_doctor_fails_on_an_error(tmp_path: Path) -> None:
    info = tmp_path / "apache_tvm_ffi-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15\n")
    done = command("doctor", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "error  tvm: " in done.stdout
    assert "-> pip install" in done.stdout


# -- tune: what is wrong is found at once ----------------------------------------------------------

SMALL = ["--workload", "matmul:m=64,n=64,k=64"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a MODEL or --workload"),
        (["model.onnx", *SMALL], "give either a MODEL or --workload"),
        (["no-such-file.onnx"], "no-such-file.onnx does not exist"),
        (["."], "is a directory"),
        (["/dev/null"], "is no regular file"),
        (["--workload", "matmull"], "matmull"),
        (["--workload", "matmul:q=3"], "q"),
        (["--workload", "matmul:m=0"], "m"),
        ([*SMALL, "--objective", "speed"], "unknown objective 'speed'"),
        ([*SMALL, "--policy", "psychic"], "psychic"),
        ([*SMALL, "--input-shape", "x=1"], "--input-shape belongs to a MODEL"),
        (["no.onnx", "--input-shape", "data"], "does not exist"),
        ([*SMALL, "--trials", "0"], "--trials"),
        ([*SMALL, "--trials", "-5"], "--trials"),
        ([*SMALL, "--trials", "many"], "--trials"),
        ([*SMALL, "--trials-per-round", "0"], "--trials-per-round"),
        ([*SMALL, "--finalists", "-1"], "--finalists"),
        ([*SMALL, "--window-s", "0"], "--window-s"),
        ([*SMALL, "--clocks", "2"], "--clocks"),
        ([*SMALL, "--clocks", "5", "--finalists", "0"], "--finalists"),
        (
            [*SMALL, "--clocks", "5", "--objective", "latency"],
            "the highest clock is always the best",
        ),
        ([*SMALL, "--clocks", "5", "--device", "cpu"], "the clock of a CPU is not locked"),
        ([*SMALL, "--clock-per-kernel"], "--clock-per-kernel needs --clocks"),
        ([*SMALL, "--seed", "-1"], "--seed"),
        ([*SMALL, "--model", "no-such-folder"], "--model no-such-folder: there is no such file"),
        ([*SMALL, "--prior", "magic"], "unknown prior 'magic'; known are none, counts"),
        ([*SMALL, "--max-tasks", "0"], "--max-tasks"),
        ([*SMALL, "--device", "toaster"], "unknown device 'toaster'"),
    ],
)
def test_tune_refuses_wrong_arguments(cli: Cli, arguments: list[str], message: str) -> None:
    outcome = cli("tune", *arguments)
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_input_shapes() -> None:
    assert parse_input_shapes(["data=1,3,224,224", "b=c=7", "x=2x4"]) == {
        "data": (1, 3, 224, 224),
        "b=c": (7,),
        "x": (2, 4),
    }


@pytest.mark.parametrize("text", ["", "data", "data=", "=1,2", "data=1,,2", "data=0", "data=1,-1"])
def test_wrong_input_shapes(text: str) -> None:
    with pytest.raises(ConfigurationError, match="NAME=1,3,224,224"):
        parse_input_shapes([text])


def names(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks]


NETWORK = [
    Task("conv1", None, weight=1, flop=50.0),
    Task("conv2", None, weight=3, flop=20.0),
    Task("softmax", None, weight=1, flop=1.0),
    Task("dense", None, weight=1, flop=55.0),
]


def test_all_tasks_are_tuned_unless_some_are_chosen() -> None:
    assert select(NETWORK, None, None) == NETWORK
    assert names(select(NETWORK, "conv*", None)) == ["conv1", "conv2"]
    assert names(select(NETWORK, "dense, conv1", None)) == ["conv1", "dense"]
    assert select(NETWORK, None, 9) == NETWORK


def test_the_costliest_tasks_are_those_with_most_operations_over_all_calls() -> None:
    assert names(select(NETWORK, None, 2)) == ["conv2", "dense"]
    assert names(select(NETWORK, "conv*", 1)) == ["conv2"]


def test_a_pattern_that_fits_nothing_lists_the_names() -> None:
    with pytest.raises(ConfigurationError, match="'pool'; there are conv1, conv2, softmax, dense"):
        select(NETWORK, "conv1,pool", None)
    with pytest.raises(ConfigurationError, match="no kernel to tune"):
        select([], None, None)


def test_the_work_dir_is_named_after_what_is_tuned() -> None:
    def name(device: str = "sim:a100", **what) -> str:
        return Source.parse(
            what.get("model"), what.get("workloads", []), what.get("shapes", [])
        ).directory_name(device)

    assert name(model="onnx:alexnet") == "tvm-energy-alexnet-sim-a100"
    assert name(model="onnx:alexnet", shapes=["data=2,3"]) != name(model="onnx:alexnet")
    assert name("cuda:GPU-1", workloads=["matmul:m=2,n=2,k=2"]).endswith("-cuda-GPU-1")
    many = [f"matmul:m={size}" for size in range(1, 20)]
    assert name(workloads=many) == name(workloads=many)
    assert name(workloads=many) != name(workloads=many[:-1])
    assert len(name(workloads=many)) < 130


# -- progress --------------------------------------------------------------------------------------


def drive(progress) -> None:
    progress.started(["conv", "matmul"], 100, "sim:a100", 20)
    progress.message("a task is left out")
    progress.round_finished("conv", round_record(candidates=64, measured=9), 84)
    progress.round_finished("matmul", round_record("w1", round=3, best_latency_s=None), 100)
    progress.finals_started("conv")
    progress.finished()
    progress.finished()


EXPECTED = [
    "SIMULATED DEVICE sim:a100: no real joules were measured",
    "Tuning 2 kernels on sim:a100: 100 trials",
    "a task is left out",
    "conv round 1: 64 tried, 9 measured for energy, fastest 1.00 ms",
    "matmul round 4: 4 tried, 2 measured for energy, no kernel has run yet",
]


def test_plain_progress_is_a_line_a_round_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    drive(PlainProgress())
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [re.sub(r"^\[\d+/100, \d+ s\] ", "", line) for line in lines[:5]] == EXPECTED
    assert lines[3].startswith("[84/100, ")
    assert "finalists of conv" in lines[5]


def test_live_progress_shows_the_same_news() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    drive(TerminalProgress(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for line in EXPECTED:
        assert line in plain
    assert "100/100" in plain
    assert "\x1b[?25h" in text  # the cursor is shown again


def test_a_run_that_fails_before_it_starts_can_finish_its_progress() -> None:
    TerminalProgress(Console(file=io.StringIO(), force_terminal=True)).finished()
    PlainProgress().finished()


def test_progress_that_suits_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(quiet=True), SilentProgress)
    drive(SilentProgress())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert isinstance(make_progress(quiet=False), PlainProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_progress(quiet=False), TerminalProgress)


# -- tune, for real, on a simulated GPU ------------------------------------------------------------

TUNE = ["tune", *SMALL, "--device", "sim:a100", "--population", "64", "--seed", "3"]
TUNE += ["--trials-per-round", "8", "--finalists", "2"]


@dataclass(frozen=True)
class Run:
    work_dir: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tune")
    done = command(*TUNE, "--trials", "8", "--work-dir", "out", "--json", cwd=folder)
    return Run(folder / "out", done)


@pytest.mark.tuning
def test_tune_ends_with_one_object_on_stdout(run: Run) -> None:
    assert run.done.returncode == 0, run.done.stderr
    values = json.loads(run.done.stdout)
    assert values["simulated"] is True
    assert (values["device"], values["objective"]) == ("sim:a100", "energy:slack=0.05")
    assert values["work_dir"] == "out"
    (task,) = values["tasks"]
    assert task["name"].startswith("matmul:m=64,n=64,k=64")
    assert task["candidates"] == 8
    assert task["energy_measurements"] >= 1
    for kernel in (task["fastest"], task["best"]):
        assert kernel["measured"] is True
        assert kernel["energy_j"] == pytest.approx(kernel["power_w"] * kernel["latency_s"])
        assert kernel["energy_stderr_j"] > 0


@pytest.mark.tuning
def test_tune_tells_its_progress_on_stderr(run: Run) -> None:
    assert "SIMULATED DEVICE sim:a100" in run.done.stderr
    assert re.search(r"\[8/8, \d+ s\] matmul", run.done.stderr)
    assert "Traceback" not in run.done.stderr


@pytest.mark.tuning
def test_the_report_of_a_tuned_directory_is_what_tune_said(run: Run, cli: Cli) -> None:
    values = json.loads(run.done.stdout)
    del values["work_dir"]
    assert json.loads(cli("report", run.work_dir, "--json").stdout) == values


@pytest.mark.tuning
def test_the_same_command_continues_and_measures_nothing_twice(run: Run, cli: Cli) -> None:
    log = run.work_dir / FILE_NAME
    before = log.read_text().count('"kind": "candidate"')
    outcome = cli(*TUNE, "--trials", "8", "--work-dir", run.work_dir)
    assert outcome.code == 0, outcome.stderr
    assert "continuing: 8 candidates are on record" in outcome.stderr
    assert log.read_text().count('"kind": "candidate"') == before
    assert outcome.stdout.startswith("SIMULATED DEVICE sim:a100")


@pytest.mark.tuning
def test_a_directory_in_use_is_refused(run: Run, cli: Cli) -> None:
    with locked_work_dir(run.work_dir):
        outcome = cli(*TUNE, "--trials", "8", "--work-dir", run.work_dir)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert f"in use by another tuning run (process {os.getpid()})" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.tuning
def test_a_directory_of_another_device_is_refused(run: Run, cli: Cli) -> None:
    other = [item.replace("sim:a100", "sim:h200") for item in TUNE]
    outcome = cli(*other, "--trials", "8", "--work-dir", run.work_dir)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "belongs to device" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.tuning
def test_an_energy_objective_without_a_meter_is_refused(cli: Cli, tmp_path: Path) -> None:
    if any(Path("/sys/class/powercap").glob("*rapl:*")):
        pytest.skip("this processor's energy may be readable")
    outcome = cli("tune", *SMALL, "--device", "cpu", "--work-dir", tmp_path / "out")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert (
        "use --objective latency; or tune for a simulated device such as sim:a100" in outcome.stderr
    )


@pytest.mark.tuning
def test_a_file_as_work_dir_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    outcome = cli(*TUNE, "--work-dir", tmp_path / "out")
    assert outcome.code == 1
    assert "is a file, not a directory" in outcome.stderr
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.tuning
def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tvm_energy.cli", *TUNE, "--trials", "4000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "round 1:" in line:
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate(timeout=120)
    text = "".join(lines) + rest
    assert process.returncode == 130, text
    assert out == ""
    (work_dir,) = re.findall(r"Work directory: (\S+)", text)
    assert f"kept in {work_dir}; continue with:\n  tvm-energy tune --workload matmul:m=64" in rest
    assert "Traceback" not in text
    report = command("report", tmp_path / work_dir, "--json")
    assert report.returncode == 0
    assert json.loads(report.stdout)["tasks"][0]["candidates"] >= 8
