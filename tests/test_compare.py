from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from log_examples import candidate, header, two_tasks, write_log
from typer.testing import CliRunner

from tvm_energy.cli import app
from tvm_energy.compare import compare, timing_error
from tvm_energy.errors import ConfigurationError
from tvm_energy.records import Record, TaskRecord


def logs(tmp_path: Path, a: list[Record], b: list[Record]) -> tuple[Path, Path]:
    write_log(tmp_path / "a", a)
    write_log(tmp_path / "b", b)
    return tmp_path / "a", tmp_path / "b"


def one(
    energy_j: float, *, error: float = 0.01, latency_s: float = 1e-3, **options
) -> list[Record]:
    return [
        header(**options),
        TaskRecord(task="conv", workload="w0", weight=3),
        candidate(
            "k",
            latency_s,
            energy_j,
            relative_stderr=error,
            simulated=options.get("simulated", True),
        ),
    ]


@pytest.mark.parametrize(
    ("energy_j", "error", "verdict"),
    [
        (0.19, 0.01, "less"),  # 5 % less, interval ± 2.8 %
        (0.21, 0.01, "more"),
        (0.195, 0.01, "no difference"),
        (0.19, 0.03, "no difference"),
        (0.2, 0.0, "no difference"),
    ],
)
def test_a_difference_counts_only_beyond_the_noise(
    tmp_path: Path, energy_j: float, error: float, verdict: str
) -> None:
    result = compare(*logs(tmp_path, one(0.2, error=error), one(energy_j, error=error)))
    (task,) = result.tasks
    assert task.energy is not None
    assert task.energy.value == pytest.approx(energy_j / 0.2)
    assert task.energy.verdict == verdict
    width = 2 * math.sqrt(2) * error
    assert task.energy.low == pytest.approx(energy_j / 0.2 * math.exp(-width))
    assert task.energy.high == pytest.approx(energy_j / 0.2 * math.exp(width))
    assert result.energy is not None
    assert result.energy.value == pytest.approx(task.energy.value)
    assert (task.weight, task.same_kernel) == (3, True)


def test_times_have_an_interval_where_kernels_were_timed_twice(tmp_path: Path) -> None:
    few = one(0.2)
    assert timing_error(few) is None
    a, b = logs(tmp_path, few, one(0.2, latency_s=0.9e-3))
    (task,) = compare(a, b).tasks
    assert (task.latency.value, task.latency.verdict) == (pytest.approx(0.9), "not known")
    # Measured 2 % slower than timed in the search: one timing's error is 2 % / sqrt(2).
    many = [candidate(str(i), 1e-3 * (i + 1), 0.2) for i in range(4)]
    import dataclasses

    slower = [
        dataclasses.replace(
            item, measured=dataclasses.replace(item.measured, latency_s=item.latency_s * 1.02)
        )
        for item in many
        if item.measured and item.latency_s
    ]
    assert timing_error(slower) == pytest.approx(math.log(1.02) / math.sqrt(2))
    assert timing_error(many) == 0


def test_tasks_of_one_run_only_are_named(tmp_path: Path) -> None:
    result = compare(*logs(tmp_path, two_tasks(), one(0.2)))
    assert [task.workload for task in result.tasks] == ["w0"]
    assert (result.only_a, result.only_b) == (("matmul",), ())
    other = [header(), TaskRecord(task="x", workload="w9"), candidate("k", 1, 1, workload="w9")]
    result = compare(*logs(tmp_path / "2", one(0.2), other))
    assert result.tasks == ()
    assert result.energy is None
    assert "no kernel in common" in result.notes[-1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a, b = logs(tmp_path, one(0.2, device="sim:a100"), one(0.2, device="sim:h200"))
    with pytest.raises(
        ConfigurationError, match=r"different devices, sim:a100 .* --across-devices"
    ):
        compare(a, b)
    assert "the devices differ" in compare(a, b, across_devices=True).notes[0]
    a, b = logs(tmp_path / "2", one(0.2), one(0.2, device="NVIDIA H200", simulated=False))
    with pytest.raises(ConfigurationError, match="sim:a100 is simulated and NVIDIA H200 is not"):
        compare(a, b, across_devices=True)
    scopes = [one(0.2, meter={"scope": scope}) for scope in ("gpu", "module")]
    with pytest.raises(ConfigurationError, match="different scopes, gpu and module"):
        compare(*logs(tmp_path / "3", *scopes))


def test_other_circumstances_are_noted(tmp_path: Path) -> None:
    a, b = logs(tmp_path, one(0.2), one(0.2, plan={"window_s": 4.0}))
    assert compare(a, b).notes == ("measuring plan window_s: 1.0 and 4.0",)


def test_the_command(tmp_path: Path) -> None:
    a, b = map(str, logs(tmp_path, one(0.2), one(0.15)))
    printed = CliRunner().invoke(app, ["compare", a, b])
    assert printed.exit_code == 0
    assert "SIMULATED" in printed.stdout
    assert "0.750" in printed.stdout
    values = json.loads(CliRunner().invoke(app, ["compare", a, b, "--json"]).stdout)
    assert values["tasks"][0]["energy"]["verdict"] == "less"
    assert values["totals"]["energy"]["value"] == pytest.approx(0.75)
    assert CliRunner().invoke(app, ["compare", a, str(tmp_path / "no")]).exit_code == 2
