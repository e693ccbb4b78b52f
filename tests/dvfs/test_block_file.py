from __future__ import annotations

import json
from pathlib import Path

import pytest

from tvm_energy.dvfs.block_file import read_block_file
from tvm_energy.errors import ConfigurationError


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_units_come_from_the_column_names(tmp_path: Path) -> None:
    milli = write(
        tmp_path, "block,clock_ghz,latency_ms,power_mw\na,1,20,5000\na,0.5,30,2000\n", "a.csv"
    )
    base = write(
        tmp_path, "block,clock_mhz,time_s,energy_j\na,500,0.03,0.06\na,1000,0.02,0.1\n", "b.csv"
    )
    one, other = read_block_file(milli).table, read_block_file(base).table
    assert one.clocks_mhz.tolist() == other.clocks_mhz.tolist() == [500, 1000]
    assert one.latency_s == pytest.approx(other.latency_s)
    assert one.energy_j == pytest.approx(other.energy_j)


def test_json_and_csv_agree_and_rows_of_one_clock_are_averaged(tmp_path: Path) -> None:
    rows = [
        {"block": "a", "clock_mhz": 500, "latency_ms": 10, "energy_mj": 50, "output_bytes": 8, "server_ms": 1},
        {"block": "a", "clock_mhz": 500, "latency_ms": 12, "energy_mj": 70, "output_bytes": 8, "server_ms": 1},
    ]  # fmt: skip
    text = "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])
    for path in (
        write(tmp_path, text),
        write(tmp_path, json.dumps(rows), "list.json"),
        write(tmp_path, json.dumps({"rows": rows}), "object.json"),
    ):
        found = read_block_file(path)
        assert found.table.latency_s.tolist() == [[pytest.approx(0.011)]]
        assert found.table.energy_j.tolist() == [[pytest.approx(0.06)]]
        assert found.output_bits is not None
        assert found.output_bits.tolist() == [64]
        assert found.server_s is not None
        assert found.server_s.tolist() == [pytest.approx(1e-3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("clock_mhz,latency_ms,power_w\n", "holds no rows"),
        ("clock_mhz,power_w\n500,5\n", "no column for latency.*latency_ms"),
        ("clock,latency_ms,power_w\n500,1,5\n", "'clock' has no unit.*clock_mhz"),
        ("clock_mhz,latency_h,power_w\n500,1,5\n", "unit 'h'.*latency_ms"),
        ("clock_mhz,latency_ms\n500,1\n", "energy_j.*or of power"),
        ("clock_mhz,latency_ms,power_w,energy_j\n500,1,5,1\n", "one of them"),
        ("clock_mhz,latency_ms,power_w\n500,fast,5\n", "row 1, column 'latency_ms': 'fast'"),
        ("clock_mhz,latency_ms,power_w\n500,,5\n", "'' is not a number"),
        ("clock_mhz,latency_ms,power_w\n500,1\n", "None is not a number"),
        ("clock_mhz,latency_ms,power_w\n500,1,5,7\n", "more values than columns"),
        ("clock_mhz,latency_ms,power_w\n500,0,5\n", "must be positive"),
        ("clock_mhz,latency_s,energy_mj\n500,20,5\n", "mixed up"),
        ("block,clock_mhz,latency_ms,power_w\na,500,1,5\nb,600,1,5\n", "'a' has no row at 600 MHz"),
        (
            "block,clock_mhz,latency_ms,power_w,server_ms\na,500,1,5,1\na,600,1,5,2\n",
            "differ in server",
        ),
    ],
)
def test_bad_tables_name_the_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_block_file(write(tmp_path, text))


@pytest.mark.parametrize("text", ["{", "3", "[1]", "{}", '{"rows": {}}'])
def test_bad_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError):
        read_block_file(write(tmp_path, text, "table.json"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_block_file(tmp_path / "nothing.csv")
