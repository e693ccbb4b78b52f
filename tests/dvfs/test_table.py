"""Tables of all kinds are understood, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tvm_energy.dvfs.table import read_table
from tvm_energy.errors import ConfigurationError, RecordFormatError, TvmEnergyError

DATA = Path(__file__).parent.parent / "data" / "dvfs"


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "clock_mhz,latency_s,power_w\n500,0.02,50\n1000,0.01,100\n",
        "frequency,time_ms,Energy [mJ]\n500,20,1000\n1000,10,1000\n",
        "Freq (GHz);latency_us;power_mw\n0.5;20000;50000\n1;10000;100000\n",
        "sm_clock_hz\ttime_s\tenergy_j\n5e8\t0.02\t1\n1e9\t0.01\t1\n",
        "frequency,time,power\n500000000,0.02,50000\n1000000000,0.01,100000\n",
        "frequency,time_ms,power_w,energy\n500,20,50,1000\n1000,10,100,1000\n",
    ],
)
def test_units_are_recognised(tmp_path: Path, text: str) -> None:
    table = read_table(write(tmp_path, text))
    (one,) = table.series
    assert one.clock_mhz == pytest.approx([500, 1000])
    assert one.latency_s == pytest.approx([0.02, 0.01])
    assert one.power_w == pytest.approx([50, 100])
    assert len(table.reading) >= 3


def test_json_comes_in_three_shapes(tmp_path: Path) -> None:
    rows = [{"clock_mhz": 500, "time_s": 2}, {"clock_mhz": 1000, "time_s": 1}]
    lists = {"clock_mhz": [500, 1000], "time_s": [2, 1]}
    for value in (rows, lists, {"rows": rows}, {"cache": {"a": rows[0], "b": rows[1]}}):
        (one,) = read_table(write(tmp_path, json.dumps(value), "t.json")).series
        assert one.latency_s.tolist() == [2, 1]
        assert one.power_w is None


def test_kernel_tuner_caches_are_in_milliseconds() -> None:
    path = DATA / "kernel_tuner" / "synthetic_fp32_cache_NVIDIA_A100-PCIE-40GB_81freq.json.xz"
    (one,) = read_table(path).series
    assert len(one.clock_mhz) == 81
    assert one.latency_s[-1] == pytest.approx(0.1964, rel=1e-3)
    assert one.power_w is not None
    assert one.power_w[-1] == pytest.approx(153.6, abs=0.1)


def test_the_published_stage_has_its_least_energy_at_1065_mhz() -> None:
    path = DATA / "zeus" / "stage_profile_bloom+a100_sxm_bf16.csv.xz"
    series = read_table(path, by=["stage", "instruction"]).series
    assert len(series) == 16
    first = next(one for one in series if one.name == "0, forward")
    assert first.power_w is not None
    energy = first.latency_s * first.power_w
    best = int(np.argmin(energy))
    assert first.clock_mhz[best] == 1065
    assert 1 - energy[best] / energy[-1] == pytest.approx(0.32, abs=0.005)
    assert first.latency_s[best] / first.latency_s[-1] - 1 == pytest.approx(0.245, abs=0.005)


def test_repeats_are_averaged_and_give_the_noise(tmp_path: Path) -> None:
    text = "clock_mhz,time_s\n500,1.9\n500,2.1\n1000,1.0\n1000,1.0\n"
    table = read_table(write(tmp_path, text))
    (one,) = table.series
    assert one.latency_s.tolist() == [2.0, 1.0]
    assert one.repeats.tolist() == [2, 2]
    assert one.latency_noise == pytest.approx(0.025)
    assert "averaged" in table.reading[-1]


def test_effective_clocks_are_kept_apart_from_requested(tmp_path: Path) -> None:
    text = "clock_mhz,effective_clock_mhz,time_s\n500,500,2\n1000,900,1.1\n"
    (one,) = read_table(write(tmp_path, text)).series
    assert one.clock_mhz.tolist() == [500, 1000]
    assert one.effective_mhz.tolist() == [500, 900]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("clock_mhz,time_s\n", "no rows"),
        ("mhz,seconds\n1,2\n", "recognised as clock"),
        ("clock_mhz,watts\n1,2\n", "recognised as time"),
        ("clock_mhz,time_s\n500,0\n1000,1\n", "row 1: time_s is 0"),
        ("clock_mhz,time_s\n500,2\n1000,-1\n", "row 2: time_s is -1"),
        ("clock_mhz,time_s\n500,2\n1000,fast\n", "'fast', not a number"),
        ("clock_mhz,time_s\n500,nan\n1000,1\n", "row 1"),
        ("clock_mhz,time_s\n500,2\n1000\n", "not as many fields"),
        ("clock_mhz,time_s\n500,2\n500,2\n", "all rows are at one clock, 500 MHz"),
        ("clock_mhz,time_s\n500,2\n1000,0.001\n", "another unit"),
        ("clock_mhz,time_s,power_w\n500,2,50000000\n1000,1,60000000\n", "the power would be"),
        ("clock_mhz,time_s,power_w,energy_j\n500,2,50,1\n1000,1,60,1\n", "do not fit together"),
    ],
)
def test_bad_tables_are_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TvmEnergyError, match=message):
        read_table(write(tmp_path, text))


def test_bad_json_and_bad_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordFormatError, match="not valid JSON"):
        read_table(write(tmp_path, "{", "t.json"))
    with pytest.raises(RecordFormatError, match="equally long"):
        read_table(write(tmp_path, '{"clock_mhz": [1], "time_s": [1, 2]}', "t.json"))
    path = write(tmp_path, "clock_mhz,time_s\n500,2\n1000,1\n")
    with pytest.raises(ConfigurationError, match="no unit of time"):
        read_table(path, units={"time": "hours"})
    with pytest.raises(ConfigurationError, match="no column is called 'kernel'"):
        read_table(path, by=["kernel"])
    with pytest.raises(ConfigurationError, match="no column is called 'x'"):
        read_table(path, columns={"time": "x"})
