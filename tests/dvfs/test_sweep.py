"""Sweeps measure few clocks, look at nothing else, release what they lock, and find the best clock."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tvm_energy.cli import main
from tvm_energy.dvfs.sampling import first_clocks, next_clock
from tvm_energy.dvfs.sweep import Point, Recorded, sweep
from tvm_energy.dvfs.table import read_table
from tvm_energy.errors import ConfigurationError, MeasurementError
from tvm_energy.simulation.devices import A100
from tvm_energy.simulation.load import SimulatedGpu

DATA = Path(__file__).parent.parent / "data" / "dvfs"
TABLE = DATA / "kernel_tuner" / "synthetic_fp32_cache_NVIDIA_A100-PCIE-40GB_81freq.json.xz"


class Bench:
    """A device of exact formulas, with a power cap; keeps a diary."""

    def __init__(self, cap_mhz: float = np.inf) -> None:
        self.clock_mhz = np.arange(600.0, 1801.0, 50.0)
        self.cap_mhz = cap_mhz
        self.held: float | None = None
        self.diary: list[float] = []

    @contextlib.contextmanager
    def locked(self, clock_mhz: float) -> Iterator[None]:
        self.held = clock_mhz
        try:
            yield
        finally:
            self.held = None

    def measure(self, clock_mhz: float) -> list[Point]:
        assert self.held == clock_mhz
        self.diary.append(clock_mhz)
        f = min(clock_mhz, self.cap_mhz)
        power = 40 + 0.06 * f * (1 + 8e-4 * max(0.0, f - 1300)) ** 2
        return [Point(latency_s=2 / f + 1e-3, power_w=power, effective_mhz=f)]


def test_a_sweep_finds_the_best_clock_with_a_fifth_of_the_measurements() -> None:
    bench = Bench()
    result = sweep(bench.clock_mhz, ["k"], bench, bench.measure)
    energy = result.studies[0].energy
    assert energy is not None
    true = [p.latency_s * p.power_w for f in bench.clock_mhz for p in self_measured(f)]
    assert true[energy.chosen] <= 1.01 * min(true)
    assert len(bench.diary) <= 8
    assert tuple(bench.diary) == result.order_mhz
    assert bench.held is None


def self_measured(clock_mhz: float) -> list[Point]:
    bench = Bench()
    with bench.locked(clock_mhz):
        return bench.measure(clock_mhz)


def test_requested_and_effective_clock_are_kept_apart() -> None:
    bench = Bench(cap_mhz=1400)
    result = sweep(bench.clock_mhz, ["k"], bench, bench.measure)
    latency = result.studies[0].latency
    assert latency.cap_mhz == pytest.approx(1400)
    assert latency.predict(1800.0) == pytest.approx(2 / 1400 + 1e-3, rel=0.01)


def test_the_clock_is_released_when_measuring_fails() -> None:
    bench = Bench()

    def fail(clock_mhz: float) -> list[Point]:
        raise MeasurementError("gone")

    with pytest.raises(MeasurementError):
        sweep(bench.clock_mhz, ["k"], bench, fail)
    assert bench.held is None


def test_the_choice_of_clocks_is_deterministic_and_new_each_time() -> None:
    recorded = Recorded(read_table(TABLE).series)
    one, two = (
        sweep(recorded.clock_mhz, ["k"], recorded, recorded.measure, max_clocks=9, regret=0.0)
        for _ in range(2)
    )
    assert one.order_mhz == two.order_mhz
    assert len(set(one.order_mhz)) == len(one.order_mhz)


def test_every_clock_of_a_small_table_is_measured_in_the_end() -> None:
    f = np.array([500.0, 700, 900, 1100])
    done = first_clocks(f)
    t, p = 1 / f, 20 + f / 20
    while (index := next_clock(f, done, t[done], p[done])) is not None:
        done = sorted({*done, index})
    assert done == [0, 1, 2, 3]


def test_one_clock_is_no_sweep() -> None:
    with pytest.raises(ConfigurationError, match="two clocks"):
        first_clocks([1000.0])


def test_a_table_without_power_cannot_be_swept(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("clock_mhz,time_s\n500,2\n1000,1\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="needs power or energy"):
        Recorded(read_table(path).series)


def test_the_simulated_card_holds_a_clock_and_lets_go() -> None:
    gpu = SimulatedGpu(A100)
    with gpu.locked(1004.0) as clock:
        assert clock == gpu.clock_mhz == 1005.0
    assert gpu.clock_mhz is None


def test_five_measured_clocks_of_the_a100_table_find_its_least_energy() -> None:
    (one,) = read_table(TABLE).series
    recorded = Recorded([one])
    result = sweep(recorded.clock_mhz, ["k"], recorded, recorded.measure, max_clocks=5)
    energy = result.studies[0].energy
    assert energy is not None
    assert one.power_w is not None
    true = one.latency_s * one.power_w
    assert one.clock_mhz[np.argmin(true)] == pytest.approx(1035, abs=30)
    assert true[energy.chosen] <= 1.01 * true.min()


# ---- the commands ---------------------------------------------------------------------------------


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tvm-energy", "dvfs", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfd.readouterr()
    return int(exit_.value.code or 0), out, err


def test_fit_says_what_it_read_and_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capfd, "fit", TABLE)
    assert code == 0
    assert "time: column 'time' in ms" in out
    assert "error left out" in out
    assert "least energy: 21." in out


def test_sweep_of_a_file_prints_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "points.csv"
    code, out, _ = run(
        monkeypatch, capfd, "sweep", "--from", TABLE, "--json", "-q", "--save", saved
    )
    values = json.loads(out)
    assert code == 0
    assert len(values["order_mhz"]) <= 8
    assert abs(values["workloads"][0]["energy"]["chosen_mhz"] - 1035) <= 45
    assert len(read_table(saved).series[0].clock_mhz) == len(values["order_mhz"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "give either --workload or --from"),
        (["sweep", "--workload", "matmul:m=64,n=64,k=64", "--device", "cpu"], "cannot be locked"),
        (["fit", TABLE, "--unit", "speed=ms"], "--unit 'speed=ms'"),
        (["fit", TABLE, "--latency-form", "cubic"], "unknown form 'cubic'"),
    ],
)
def test_wrong_use_exits_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    code, _, err = run(monkeypatch, capfd, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.tuning
def test_a_simulated_kernel_has_its_best_clock_near_the_ridge(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        monkeypatch,
        capfd,
        "sweep",
        "-w",
        "matmul:m=512,n=512,k=512",
        "--device",
        "sim:a100",
        "--json",
    )
    assert code == 0, err
    values = json.loads(out)
    assert "Simulated" in values["source"]
    chosen = values["workloads"][0]["energy"]["chosen_mhz"]
    assert abs(chosen - A100.ridge_clock_mhz) <= 60


def test_plot_draws_a_picture(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "clocks.png"
    code, _, err = run(monkeypatch, capfd, "fit", TABLE, "--plot", picture)
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = run(monkeypatch, capfd, "fit", TABLE, "--plot", tmp_path / "clocks.xyz")
    assert code == 2
    assert "xyz" in err
