from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tvm_energy.cli import app
from tvm_energy.cli.dvfs_plan import quantity
from tvm_energy.errors import ConfigurationError

TABLE = """block,clock_mhz,latency_ms,power_w,output_bytes,server_ms
[a],500,10,5,20000,0.5
[a],1000,6,12,20000,0.5
b,500,8,6,4000,0.4
b,1000,7,9,4000,0.4
"""
RADIO = ("--input", "100kB", "--bandwidth", "10MHz", "--gain-db", "-100")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(TABLE, encoding="utf-8")
    return path


def dvfs(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["dvfs", *map(str, arguments)])


def test_plan_for_a_deadline(table: Path) -> None:
    one = json.loads(dvfs("plan", table, "--deadline", "15ms", "--json").stdout)
    each = json.loads(dvfs("plan", table, "--deadline", "15ms", "--per-block", "--json").stdout)
    assert one["plan"]["clocks_mhz"] == [1000, 1000]
    assert each["plan"]["clocks_mhz"] == [1000, 500]
    assert each["plan"]["energy_j"] == pytest.approx(0.12)
    assert not one["simulated"]
    costly = dvfs(
        "plan", table, "--deadline", "15ms", "--per-block", "--switch-energy", "1J", "--json"
    )
    assert json.loads(costly.stdout)["plan"]["switches"] == 0


def test_plan_prints_names_as_they_are(table: Path) -> None:
    done = dvfs("plan", table, "--deadline", "15ms", "--per-block")
    assert done.exit_code == 0
    assert "[a]" in done.stdout
    assert "14.0 ms" in done.stdout


def test_an_impossible_deadline_fails_with_the_nearest(table: Path) -> None:
    done = dvfs("plan", table, "--deadline", "1ms")
    assert done.exit_code == 1
    assert "nearest possible is 0.013 s" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--deadline", "15"),
        ("--deadline", "15MHz"),
        ("--deadline", "-5ms"),
        ("--deadline", "5ms", "--edp"),
        ("--switch-time", "1J"),
    ],
)
def test_bad_plan_options_are_usage_errors(table: Path, arguments: tuple[str, ...]) -> None:
    done = dvfs("plan", table, *arguments)
    assert done.exit_code == 2
    assert "error:" in done.output


def test_plot(table: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "front.png"
    assert dvfs("plan", table, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_partition_offloads_over_a_good_channel_and_not_over_none(table: Path) -> None:
    good = dvfs("partition", table, "--deadline", "15ms", *RADIO, "--json")
    none = dvfs(
        "partition", table, "--deadline", "15ms", "--input", "1kB", "--rate", "0bit/s", "--json"
    )
    assert json.loads(good.stdout)["devices"][0]["local_blocks"] == 0
    assert json.loads(none.stdout)["devices"][0]["local_blocks"] == 2


def test_partition_for_several_devices(table: Path, tmp_path: Path) -> None:
    devices = tmp_path / "devices.csv"
    devices.write_text("name,gain_db,deadline_ms\nnear,-90,15\nfar,-120,20\n", encoding="utf-8")
    arguments = ("--input", "100kB", "--bandwidth", "10MHz", "--devices", devices)
    done = dvfs("partition", table, "--deadline", "15ms", *arguments, "--json")
    found = json.loads(done.stdout)
    assert [item["name"] for item in found["devices"]] == ["near", "far"]
    assert found["lower_bound_j"] <= found["energy_j"]
    assert dvfs("partition", table, "--deadline", "15ms", *arguments).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--rate", "10Mbit/s"),  # the size of the input is missing
        ("--rate", "10Mbit/s", "--bandwidth", "1MHz"),
        ("--bandwidth", "10MHz"),
        ("--bandwidth", "10MHz", "--gain-db", "10", "--input", "1kB"),
    ],
)
def test_bad_partition_options_are_usage_errors(table: Path, arguments: tuple[str, ...]) -> None:
    done = dvfs("partition", table, "--deadline", "15ms", *arguments)
    assert done.exit_code == 2
    assert "error:" in done.output


def test_quantities() -> None:
    assert quantity("20ms", "s", "--x") == pytest.approx(0.02)
    assert quantity("1.5e3 kB", "B", "--x") == 1.5e6
    for text in ("", "ms", "20", "20 m", "1e999x", "1..2s"):
        with pytest.raises(ConfigurationError, match="--x"):
            quantity(text, "s", "--x")
