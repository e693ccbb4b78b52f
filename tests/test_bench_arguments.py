"""Numbers of the benchmarks: none of them takes 0 for its default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("bench_ansor_energy", "--trials"),
        ("bench_energy", "--population"),
        ("bench_energy_model", "--rounds"),
        ("bench_log", "--records"),
        ("bench_meter", "--runs"),
        ("bench_policy", "--seeds"),
        ("bench_throughput", "--trials"),
    ],
)
def test_numbers_that_cannot_be_are_refused(script: str, option: str) -> None:
    for wrong in ("0", "-3", "many"):
        done = subprocess.run(
            [sys.executable, SCRIPTS / f"{script}.py", f"{option}={wrong}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        said = done.stderr.splitlines()[-1]
        assert said.endswith(
            f"argument {option}: must be a whole number of at least 1, got {wrong}"
        )
