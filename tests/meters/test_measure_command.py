"""``tvm-energy measure -- COMMAND`` on the stand-in library, in real time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import standin_environment


class Shell:
    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.folder = folder

    def start(self, *arguments: str, knobs: str = "", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tvm_energy.cli", "measure", *arguments],
            env=standin_environment(
                self.library, knobs, self.folder, XDG_CACHE_HOME=str(self.folder), **environment
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as under a terminal
        )

    def run(self, *arguments: str, **options: str) -> tuple[int | None, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def shell(standin_library: Path, tmp_path: Path) -> Shell:
    return Shell(standin_library, tmp_path)


QUICK = ("--idle", "0", "--device", "cuda:0")


def test_energy_of_a_command(shell: Shell) -> None:
    knobs = "gpus 2\npower 0 0 100\npower 1 0 40"
    code, out, err = shell.run(
        "--idle", "0.5", "--", "sh", "-c", "echo hello; sleep 1", knobs=knobs
    )
    assert (code, out) == (0, "hello\n")
    assert "net of" in err
    assert "all GPUs: 1" in err  # 140 W over a second
    assert "twice the standard error" in err


def test_json_keeps_stdout_for_the_result(shell: Shell) -> None:
    output = shell.folder / "result.json"
    code, out, err = shell.run(
        *QUICK,
        "--json",
        "-o",
        str(output),
        "--",
        "sh",
        "-c",
        "echo hello; sleep 1",
        knobs="power -1 0 150",
    )
    assert code == 0
    assert "hello" in err
    values: dict[str, Any] = json.loads(out)
    assert json.loads(output.read_text()) == values
    (device,) = values["devices"]
    assert device["energy_j"] == pytest.approx(150 * values["seconds"], rel=0.03)
    assert abs(device["energy_j"] - 150 * values["seconds"]) <= 3 * device["stderr_j"]
    assert values["gpu_energy_j"] == device["energy_j"]
    assert values["command"] == ["sh", "-c", "echo hello; sleep 1"]


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)])
def test_the_exit_code_is_passed_on(shell: Shell, script: str, code: int) -> None:
    returned, out, _ = shell.run(*QUICK, "--json", "--", "sh", "-c", script)
    assert returned == code
    assert json.loads(out)["exit_code"] == code


def test_a_command_too_short_for_the_sensor(shell: Shell) -> None:
    code, out, _ = shell.run(*QUICK, "--json", "--", "true", knobs="period 0.2")
    assert code == 0
    (device,) = json.loads(out)["devices"]
    assert device["energy_j"] is None
    assert "too short" in device["quality"]


def test_only_visible_gpus_are_measured(shell: Shell) -> None:
    code, out, _ = shell.run(
        "--idle", "0", "--json", "--", "sleep", "0.3", knobs="gpus 3", CUDA_VISIBLE_DEVICES="2,0"
    )
    assert code == 0
    uuids = [device["device_uuid"] for device in json.loads(out)["devices"]]
    assert uuids == ["GPU-standin-2", "GPU-standin-0"]


def test_other_processes_on_the_gpu_are_warned_of(shell: Shell) -> None:
    _, _, err = shell.run(*QUICK, "--", "sleep", "0.2", knobs="process 0 1")
    assert "other processes use this GPU" in err


def test_signals_reach_the_command_and_the_result_comes_all_the_same(shell: Shell) -> None:
    script = "trap 'echo stopped; exit 5' TERM; echo started; while :; do sleep 0.05; done"
    process = shell.start(*QUICK, "--", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (5, "stopped\n")
    assert "gross" in err


def test_ctrl_c_ends_the_command_and_the_result_comes_all_the_same(shell: Shell) -> None:
    process = shell.start(*QUICK, "--", "sh", "-c", "echo started; exec sleep 30")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + 2
    assert "gross" in err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--", "no-such-program"), 2, "'no-such-program' was not found"),
        (("--device", "sim:a100", "--", "true"), 2, "is simulated and cannot run a command"),
        (("--device", "tpu", "--", "true"), 2, "unknown device 'tpu'"),
        (("--device", "cuda:7", "--", "true"), 1, "there is no GPU 7"),
        ((), 2, "give one thing to measure, not 0"),
        (("-w", "matmul", "--", "true"), 2, "give one thing to measure, not 2"),
        (("--arg", "1", "--", "true"), 2, "--arg belongs to --library"),
        (("-o", "/nonexistent/x", "--", "true"), 2, "does not exist"),
    ],
)
def test_wrong_use(shell: Shell, arguments: tuple[str, ...], code: int, text: str) -> None:
    returned, out, err = shell.run(*arguments)
    assert (returned, out) == (code, "")
    assert text in err
    assert err.count("\n") == 1


def test_without_a_meter_the_command_is_not_run(shell: Shell) -> None:
    marker = shell.folder / "ran"
    code, _, err = shell.run("--", "touch", str(marker), knobs="fail InitWithFlags 9")
    if "energy_j" not in err and code == 1:  # this machine has no RAPL either
        assert "the command was not run" in err
        assert not marker.exists()
