"""The example for Ansor runs as it is, at small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tuning_with_ansor_and_deploying_with_stock_ansor(tmp_path: Path) -> None:
    script = ROOT / "docs" / "examples" / "tune_ansor.py"
    arguments = ("--trials", "4", "--population", "16", "--work-dir", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "J a launch" in done.stdout
    assert (tmp_path / "out" / "chosen.json").read_text().count("\n") == 1
    assert "stages" in done.stdout
