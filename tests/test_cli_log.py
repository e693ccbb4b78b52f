from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from log_examples import candidate, header, two_tasks, write_log

from tvm_energy.ansor_log import LOG_FILE, names_of_line
from tvm_energy.cli import main
from tvm_energy.records import FILE_NAME

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tvm-energy", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return Outcome(exit_.value.code if isinstance(exit_.value.code, int) else 0, out, err)

    return run


@pytest.mark.parametrize("name", ["verify", "stat", "merge", "prune", "convert"])
def test_every_log_command_has_help_and_json(cli: Cli, name: str) -> None:
    outcome = cli("log", name, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.stdout


def test_log_alone_lists_its_commands(cli: Cli) -> None:
    outcome = cli("log", "--help")
    assert all(n in outcome.stdout for n in ("verify", "stat", "merge", "prune", "convert"))


def test_help_of_log_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tvm-energy', 'log', '--help']\n"
        "import tvm_energy.cli as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(*[n for n in ('pandas', 'pyarrow', 'tvm', 'scipy') if n in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_verify_succeeds_and_fails(cli: Cli, tmp_path: Path) -> None:
    good = GOLDEN / "records_v1.json"
    path = write_log(tmp_path, two_tasks())
    path.write_text(path.read_text() + '{"kind": "\\u001b[31m"}\n')
    assert cli("log", "verify", good).code == 0
    outcome = cli("log", "verify", good, tmp_path)
    assert outcome.code == 1
    assert f"error: {path}, line 16: unknown kind" in outcome.stdout
    assert "\x1b" not in outcome.stdout
    values = cli("log", "verify", tmp_path, "--json").json
    assert values["logs"][0]["errors"] == 1
    assert values["logs"][0]["problems"][-1]["line"] == 16


def test_only_the_first_problems_are_printed_unless_all_are_wanted(
    cli: Cli, tmp_path: Path
) -> None:
    path = write_log(tmp_path, [header()])
    path.write_text(path.read_text() + "junk\n" * 150)
    shown = cli("log", "verify", tmp_path).stdout
    assert shown.count("error: ") == 100
    assert "... and 50 more; --all prints every one" in shown
    assert cli("log", "verify", tmp_path, "--all").stdout.count("error: ") == 150


def test_stat_says_that_it_is_simulated(cli: Cli) -> None:
    outcome = cli("log", "stat", GOLDEN / "records_v2.json")
    assert outcome.stdout.startswith("SIMULATED DEVICE sim:a100")
    assert "matmul" in outcome.stdout
    values = cli("log", "stat", GOLDEN / "records_v2.json", "--json").json
    assert values["tasks"][0]["measured"] == 16


def test_merge_prune_and_convert(cli: Cli, tmp_path: Path) -> None:
    merged, pruned = tmp_path / "merged", tmp_path / "pruned"
    sources = [GOLDEN / "records_v1.json", GOLDEN / "records_v2.json"]
    assert cli("log", "merge", *sources, "--output", merged).code == 0
    assert cli("log", "verify", merged).code == 0
    values = cli("log", "prune", merged, "-o", pruned, "--keep", 2, "--json").json
    assert values["lines"] < values["lines_before"] == 84
    assert cli("replay", pruned, "--objective", "edp").code == 0
    assert cli("log", "convert", pruned, tmp_path / "t4.json").code == 0
    assert cli("log", "convert", tmp_path / "t4.json", tmp_path / "again").code == 0
    assert (
        cli("replay", tmp_path / "again", "--json").json["tasks"]
        == (cli("replay", pruned, "--json").json["tasks"])
    )


def test_the_commands_on_a_directory_of_ansor(cli: Cli, tmp_path: Path) -> None:
    line = (GOLDEN / "ansor_record.json").read_text()
    workload, key = names_of_line(line)
    for name in ("a", "b"):
        write_log(tmp_path / name, [header(), candidate(key, 1e-3, 0.1, workload=workload)])
        (tmp_path / name / LOG_FILE).write_text(line)
    a, merged, pruned = tmp_path / "a", tmp_path / "merged", tmp_path / "pruned"
    outcome = cli("log", "merge", a, tmp_path / "b", "-o", merged)
    assert outcome.stdout.endswith("0 workloads, 0 tuning records, 1 line of Ansor's log\n")
    assert cli("log", "verify", merged).code == 0
    assert cli("log", "stat", merged, "--json").json["tasks"][0]["measured"] == 1
    assert cli("log", "prune", merged, "-o", pruned, "--json").json["ansor_records"] == 1
    assert cli("log", "convert", pruned, tmp_path / "table.csv").code == 0
    assert cli("export", pruned, "--to", tmp_path / "best.json").code == 0
    assert (tmp_path / "best.json").read_text() == line


def test_a_log_of_ansor_compiles_no_network(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path, [header()])
    (tmp_path / LOG_FILE).write_text("")
    outcome = cli("compile", "onnx:alexnet", "--log", tmp_path, "-o", tmp_path / "model.so")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.count("\n") == 1
    assert "legacy Ansor" in outcome.stderr
    assert f"tvm-energy export {tmp_path} --to best.json" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["log", "verify", "missing"], 2, "missing does not exist"),
        (["log", "stat", "empty"], 1, "no database_energy_record.json"),
        (["log", "merge", "log", "-o", "new"], 2, "needs two logs"),
        (["log", "merge", "log", "log", "-o", "log"], 2, "exists already"),
        (["log", "merge", "log", "other", "-o", "new"], 1, "different devices are not merged"),
        (["log", "merge", "log", "log"], 2, "Missing option '--output'"),
        (["log", "prune", "log", "-o", "new", "--keep", "0"], 2, "at least 1 kernel"),
        (["log", "prune", "log", "-o", "new", "--objective", "speed"], 2, "unknown objective"),
        (["log", "convert", "missing", "x.csv"], 2, "missing does not exist"),
        (["log", "convert", "log", "x", "--to", "xml"], 2, "unknown format 'xml'"),
        (["replay", "log", "--slack", "0.1", "--objective", "edp"], 2, "not both"),
        (["replay", "log", "--policy", "guess"], 2, "unknown policy 'guess'"),
        (["replay", "log", "other", "--together"], 1, "cannot be ranked together"),
        (["replay", "log", "log", "--together", "--steps"], 2, "cannot be combined"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", two_tasks())
    write_log(tmp_path / "other", [header("sim:h200"), candidate("a", 1e-3, 0.1)])
    (tmp_path / "empty").mkdir()
    outcome = cli(*arguments)
    assert outcome.code == code
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "new").exists()


# -- replay ----------------------------------------------------------------------------------------


def test_several_logs_are_shown_beside_one_another(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path / "a", two_tasks())
    write_log(tmp_path / "b", [header("sim:h200"), candidate("a", 1e-3, 0.1)])
    outcome = cli("replay", tmp_path / "a", tmp_path / "b", "--slack", "0.3")
    assert outcome.code == 0
    assert f"== {tmp_path / 'a'}" in outcome.stdout
    assert "objective energy:slack=0.3" in outcome.stdout
    assert "differ in device (sim:a100, sim:h200)" in outcome.stdout
    values = cli("replay", tmp_path / "a", tmp_path / "b", "--json").json
    assert [log["device"] for log in values["logs"]] == ["sim:a100", "sim:h200"]
    assert len(values["not_comparable"]) == 1


def test_logs_together_are_one(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path / "a", two_tasks())
    write_log(tmp_path / "b", [header(), candidate("z", 1e-3, 0.01)])
    values = cli("replay", tmp_path / "a", tmp_path / "b", "--together", "--json").json
    (log,) = values["logs"]
    assert log["tasks"][0]["best"]["key"] == "z"


def test_steps_are_checked_against_the_log(cli: Cli, tmp_path: Path) -> None:
    good = cli("replay", GOLDEN / "records_v2.json", "--steps")
    assert good.code == 0
    assert "the choice itself checked in 4: 0 differences" in good.stdout
    path = tmp_path / FILE_NAME
    text = (GOLDEN / "records_v2.json").read_text()
    path.write_text(text.replace('"gated": 3,', '"gated": 5,'))
    bad = cli("replay", tmp_path, "--steps")
    assert bad.code == 1
    assert "differs: gated: 3, recorded 5" in bad.stdout


def test_policies_are_compared(cli: Cli) -> None:
    log = GOLDEN / "records_v2.json"
    outcome = cli("replay", log, "--policy", "all", "--policy", "fixed:0.25")
    assert outcome.code == 0
    assert outcome.stdout.startswith("SIMULATED")
    assert "fixed:0.25" in outcome.stdout
    values = cli("replay", log, "-p", "all", "-p", "none", "--json", "--steps").json
    first, second = values["logs"][0]["replays"]
    assert (first["measured"], second["measured"]) == (16, 0)
    assert len(first["steps"]) == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_enough(cli: Cli, tmp_path: Path) -> None:
    write_log(tmp_path, two_tasks()).chmod(0o400)
    tmp_path.chmod(0o500)
    assert cli("replay", tmp_path).code == 0
