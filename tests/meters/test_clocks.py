"""Locked clocks through the real module pynvml on the stand-in library, whose log tells what was set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_zeusd import serving
from nvml_standin import standin_environment
from virtual_gpu import VirtualGpu

from tvm_energy.clocks import locked_clocks
from tvm_energy.errors import ClockUnavailable, ConfigurationError
from tvm_energy.meters.nvml_clocks import open_clock_control
from tvm_energy.simulation.devices import find_device
from tvm_energy.simulation.kernel import Instructions, KernelLaunch, KernelWork
from tvm_energy.simulation.load import SimulatedGpu

LOCK = """
import json, logging, os, signal, sys, time
from tvm_energy.clocks import locked_clocks
logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
"""


class Machine:
    """Processes on a stand-in GPU, and what they did to its clock."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.folder = folder
        self.log = folder / "clock.log"

    def start(self, code: str, knobs: str = "", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LOCK + textwrap.dedent(code)],
            env=self.environment(knobs, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, knobs: str = "", **environment: str) -> dict[str, str]:
        knobs = f"clock_log {self.log}\n" + knobs
        environment = {"ZEUSD_SOCK_PATH": "/nonexistent"} | environment
        return standin_environment(self.library, knobs, self.folder, **environment)

    def run(self, code: str, knobs: str = "", **environment: str) -> tuple[int, str, str]:
        process = self.start(code, knobs, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def cli(self, *arguments: str, knobs: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tvm_energy.cli", *arguments],
            env=self.environment(knobs),
            capture_output=True,
            text=True,
            check=False,
        )

    def changes(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split(" ", 1)[1] for line in lines]


@pytest.fixture
def machine(standin_library: Path, tmp_path: Path) -> Machine:
    return Machine(standin_library, tmp_path)


HOLD = """
with locked_clocks(1207):
    print("locked", flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("pass", 0),
        ("raise RuntimeError('the block fails')", 1),
        ("raise KeyboardInterrupt", -2),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)", 128 + 15),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(10)", 128 + 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)", -2),
    ],
)
def test_the_clock_is_released_however_the_block_ends(
    machine: Machine, then: str, code: int
) -> None:
    returned, out, err = machine.run(HOLD.format(then=then))
    assert (returned, out) == (code, "locked\n"), err
    assert machine.changes() == ["lock 1200", "reset 0"]
    assert [p.read_text() for p in machine.folder.glob("*clocks*.json")] == [""]


def test_a_signal_that_nohup_ignores_stays_ignored(machine: Machine) -> None:
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + textwrap.dedent(HOLD)
    code = code.format(then="os.kill(os.getpid(), signal.SIGHUP); print('on')")
    assert machine.run(code)[:2] == (0, "locked\non\n")
    assert machine.changes() == ["lock 1200", "reset 0"]


def test_signals_from_outside(machine: Machine) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = machine.start(HOLD.format(then="time.sleep(30)"))
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        process.send_signal(number)
        process.communicate(timeout=20)
    assert machine.changes() == ["lock 1200", "reset 0"] * 2


def test_an_exit_of_the_interpreter_releases_a_block_that_was_never_left(machine: Machine) -> None:
    machine.run("kept = locked_clocks(1200)\nkept.__enter__()\nos.environ['x'] = 'y'")
    assert machine.changes() == ["lock 1200", "reset 0"]


def test_a_fork_leaves_the_clock_to_its_parent(machine: Machine) -> None:
    code = """
    with locked_clocks(1200):
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print(open(os.environ["LOG"]).read().count("reset"))
    """
    _, out, err = machine.run(code, LOG=str(machine.log))
    assert out == "0\n", err
    assert machine.changes() == ["lock 1200", "reset 0"]


def test_after_kill_9_the_state_file_tells_and_restore_releases(machine: Machine) -> None:
    process = machine.start(HOLD.format(then="time.sleep(30)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"

    # The holder still runs: nobody takes its clock away without being told to.
    refused = machine.cli("clocks", "restore")
    assert refused.returncode == 1
    assert f"process {process.pid} holds the clocks" in refused.stderr
    shown = json.loads(machine.cli("clocks", "show", "--json").stdout)["gpus"][0]
    assert shown["locked_by_tvm_energy"]["alive"] is True
    second = machine.run(HOLD.format(then="pass"))
    assert second[:2] == (1, "")
    assert "are held already" in second[2]

    process.kill()
    process.communicate()
    assert machine.changes() == ["lock 1200"]
    text = machine.cli("clocks", "show").stdout
    assert f"locked at 1207 MHz since 20{text.split('since 20')[1][:17]} by process" in text
    assert "tvm-energy clocks restore" in text
    restored = machine.cli("clocks", "restore", "--json")
    assert json.loads(restored.stdout) == {"restored": ["GPU-standin-0"], "problems": {}}
    assert machine.changes() == ["lock 1200", "reset 0"]
    assert "No run of tvm-energy" in machine.cli("clocks", "restore").stdout


def test_restore_of_a_named_gpu_needs_no_state(machine: Machine) -> None:
    done = machine.cli("clocks", "restore", "--device", "1", knobs="gpus 2\nclock_lock 1 900\n")
    assert done.stdout == "GPU-standin-1: released\n"
    assert machine.log.read_text() == "GPU-standin-1 reset 0\n"


def test_restore_without_permission_says_so(machine: Machine) -> None:
    done = machine.cli("clocks", "restore", "-d", "0", knobs="fail ResetGpuLockedClocks 4\n")
    assert done.returncode == 1
    assert "no permission; it needs root" in done.stderr


def test_without_permission_it_measures_only_with_one_line(machine: Machine) -> None:
    code = """
    with locked_clocks(1200) as clocks:
        print(json.dumps([clocks.active, clocks.how, clocks.requested_mhz, clocks.observed_mhz()]))
        clocks.change(1100)
    """
    returned, out, err = machine.run(code, "fail SetGpuLockedClocks 4")
    assert returned == 0, err
    assert json.loads(out) == [False, "none", None, 1500]
    assert err.count("\n") == 1
    assert "no permission; it needs root" in err
    assert machine.changes() == []
    required = machine.run(
        "with locked_clocks(1200, required=True): pass", "fail SetGpuLockedClocks 3"
    )
    assert required[0] == 1
    assert "cannot lock clocks" in required[2]


def test_what_a_killed_process_locked_is_not_forgotten_by_one_without_permission(
    machine: Machine,
) -> None:
    machine.run(HOLD.format(then="os.kill(os.getpid(), signal.SIGKILL)"))
    assert machine.run(HOLD.format(then="pass"), "fail SetGpuLockedClocks 4")[1] == "locked\n"
    assert json.loads(machine.cli("clocks", "restore", "--json").stdout)["restored"]


def test_zeusd_is_asked_where_nvml_refuses(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("z") / "s"
    knobs = "fail SetGpuLockedClocks 4\nfail ResetGpuLockedClocks 4"
    with serving(path) as daemon:
        code = """
        with locked_clocks(1200) as clocks:
            print(clocks.active, clocks.how)
        """
        _, out, err = machine.run(code, knobs, ZEUSD_SOCK_PATH=str(path))
        assert out == "True zeusd\n", err
        assert daemon.requests == [
            "/gpu/set_gpu_locked_clocks?gpu_ids=1&min_clock_mhz=1200&max_clock_mhz=1200&block=true",
            "/gpu/reset_gpu_locked_clocks?gpu_ids=1&block=true",
        ]
        daemon.status = 403
        _, out, err = machine.run(code, knobs, ZEUSD_SOCK_PATH=str(path))
        assert out == "False none\n"
        assert "the token does not allow gpu-control" in err


def test_a_clock_that_does_not_exist(machine: Machine) -> None:
    returned, _, err = machine.run("with locked_clocks(99999): pass")
    assert returned == 1
    assert "ConfigurationError" in err
    assert "clocks show --supported" in err
    assert [p.read_text() for p in machine.folder.glob("*clocks*.json")] == [""]


def test_the_memory_clock_is_left_alone_unless_asked_for(machine: Machine) -> None:
    machine.run("with locked_clocks(1200): pass")
    assert machine.changes() == ["lock 1200", "reset 0"]
    machine.log.unlink()
    machine.run("with locked_clocks(1200, memory_mhz=2619): pass")
    assert machine.changes() == ["lock 1200", "lock_memory 2619", "reset 0", "reset_memory 0"]


def test_a_memory_clock_that_is_refused_releases_the_core_clock(machine: Machine) -> None:
    code = "with locked_clocks(1200, memory_mhz=2619) as c: print(c.active)"
    _, out, _ = machine.run(code, "fail SetMemoryLockedClocks 4")
    assert out == "False\n"
    assert machine.changes() == ["lock 1200", "reset 0"]


def test_a_release_that_fails_is_not_silent(machine: Machine) -> None:
    returned, _, err = machine.run(
        "with locked_clocks(1200): pass", "fail ResetGpuLockedClocks 999"
    )
    assert returned == 1
    assert "stay locked" in err
    assert "tvm-energy clocks restore" in err
    assert (
        json.loads(machine.cli("clocks", "show", "--json").stdout)["gpus"][0][
            "locked_by_tvm_energy"
        ]["clock_mhz"]
        == 1200
    )


def test_supported_clocks_are_listed_only_when_asked_for(machine: Machine) -> None:
    machine.run("with locked_clocks(1200): pass")
    plain = machine.cli("clocks", "show")
    assert plain.returncode == 0
    assert "supported 0" not in machine.changes()
    listed = json.loads(machine.cli("clocks", "show", "--supported", "--json").stdout)
    assert listed["gpus"][0]["supported_mhz"]["2619"][:2] == [1980, 1965]
    assert "supported 0" in machine.changes()


def test_state_files_of_strangers_are_not_believed(machine: Machine) -> None:
    os.mkfifo(machine.folder / "tvm_energy-clocks-a.json")
    (machine.folder / "tvm_energy-clocks-b.json").write_text('{"device_uuid": "GPU-standin-0"}')
    (machine.folder / "tvm_energy-clocks-c.json").write_text("[" * 4000)
    (machine.folder / "tvm_energy-clocks-d.json").symlink_to("/etc/passwd")
    assert "No run of tvm-energy" in machine.cli("clocks", "restore").stdout
    assert machine.changes() == []


READ_BACK = """
from nvml_standin.sleep_load import SleepLoad
with locked_clocks(1200) as clocks:
    first = clocks.read_back(SleepLoad(1e-3), seconds=0.2)
    clocks.change(900)
    second = clocks.read_back(SleepLoad(1e-3), seconds=0.2)
print(json.dumps([[r.requested_mhz, r.observed_mhz, r.held] for r in (first, second)]))
"""


def test_the_clock_is_read_back_under_load(machine: Machine) -> None:
    _, out, err = machine.run(READ_BACK, "clock 1980")
    assert json.loads(out) == [[1200, 1200, True], [900, 900, True]], err
    _, out, err = machine.run(READ_BACK, "clock 1000\nthrottle 4")
    assert json.loads(out) == [[1200, 1000, False], [900, 900, True]]
    assert "runs at 1000 MHz under load instead of the 1200 MHz asked for (sw_power_cap)" in err


def work() -> KernelWork:
    launch = KernelLaunch(
        name="fma", blocks=4096, threads_per_block=256, instructions=Instructions(fma32=4e7)
    )
    return KernelWork(launches=(launch,))


def test_a_simulated_card_runs_at_the_locked_clock() -> None:
    gpu = SimulatedGpu(find_device("a100"))
    control = open_clock_control(nvml=gpu.nvml())
    free = gpu.truth(work())
    with locked_clocks(1000, control=control) as clocks:
        reading = clocks.read_back(gpu.load(work()), time=gpu.clock)
        slow = gpu.truth(work())
        assert clocks.how == "simulated"
    assert reading.held
    assert reading.observed_mhz == pytest.approx(1000, abs=15)
    assert slow.latency_s > free.latency_s
    assert slow.power_w < free.power_w
    assert gpu.clock_mhz is None
    with pytest.raises(ConfigurationError), locked_clocks(5000, control=control):
        pytest.fail("locked")


@pytest.mark.parametrize("clock", [0, -1, 1.5, True, "1200"])
def test_a_clock_is_a_positive_whole_number(clock: Any) -> None:
    with pytest.raises(ValueError, match="positive whole number"), locked_clocks(clock):
        pytest.fail("locked")


def test_a_card_that_cannot_lock_is_only_measured(caplog: pytest.LogCaptureFixture) -> None:
    gpu = VirtualGpu()
    control = open_clock_control(nvml=gpu.nvml)
    with locked_clocks(1000, control=control) as clocks:
        assert not clocks.active
        assert "cannot lock clocks" in clocks.reason
        reading = clocks.read_back(gpu.load(1e-3, 100), seconds=0.1, time=gpu.clock)
    assert reading.observed_mhz == 1410
    assert len(caplog.records) == 1
    with (
        pytest.raises(ClockUnavailable),
        locked_clocks(1000, control=control, required=True),
    ):
        pytest.fail("locked")


# -- kernel and clock together ---------------------------------------------------------------------

#: The search of `tune --clocks` with its made-up kernels, but the clock of the stand-in GPU is locked.
SEARCH = """
from types import SimpleNamespace
sys.path.insert(0, os.environ["TESTS"])
import test_clock_search as kit
from tvm_energy.clock_search import ClockSearch
from tvm_energy.kernels.clock_control import open_clocks

control, clocks = open_clocks(SimpleNamespace(spec="cuda:GPU-standin-0"), try_out=True)
kit.CLOCKS = clocks
device = kit.Device({"w": kit.COMPUTE})
session = kit.finished(device, "energy:slack=0.2")

@kit.contextlib.contextmanager
def locked(clock):
    with control.locked(clock), device.locked(clock):
        yield

def measure(workload, keys, long):
    THEN
    return device.measure(workload, keys, long)

ClockSearch(session, clocks, 4, locked=locked, measure=measure).run()
print(json.dumps([session.choices()["w"].best.clock_mhz, [ask[0] for ask in device.asked]]))
"""
TESTS = str(Path(__file__).resolve().parent.parent)


def test_the_search_over_clocks_locks_the_gpu_for_each_and_lets_go(machine: Machine) -> None:
    returned, out, err = machine.run(SEARCH.replace("THEN", "pass"), TESTS=TESTS)
    assert returned == 0, err
    chosen, asked = json.loads(out)
    assert chosen in asked
    changes = [change for change in machine.changes() if "supported" not in change]
    order = [1980.0, *dict.fromkeys(asked[:-1]), asked[-1]]
    assert changes == [line for mhz in order for line in (f"lock {mhz:.0f}", "reset 0")]


@pytest.mark.parametrize("then", ["raise KeyboardInterrupt", "raise RuntimeError('a worker died')"])
def test_a_search_that_is_interrupted_lets_go(machine: Machine, then: str) -> None:
    returned, _, _ = machine.run(SEARCH.replace("THEN", then), TESTS=TESTS)
    assert returned != 0
    assert [line.split()[0] for line in machine.changes() if "supported" not in line] == [
        *("lock", "reset"),
        *("lock", "reset"),
    ]


def test_without_permission_the_search_is_refused_before_it_begins(machine: Machine) -> None:
    returned, out, err = machine.run(
        SEARCH.replace("THEN", "pass"), "fail SetGpuLockedClocks 4", TESTS=TESTS
    )
    assert (returned, out) == (1, "")
    assert "ClockUnavailable" in err
    assert "no permission; it needs root" in err
    assert "zeusd" in err
