from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'xgboost'\", name='xgboost')",
            "not installed",
        ),
        ("import no_such_module", "no_such_module, which xgboost needs, is not installed"),
        ("raise OSError('libgomp.so.1: cannot open shared object file')", "libgomp.so.1"),
        ("__version__ = '1.7.6'", "xgboost 1.7.6 is too old"),
    ],
)
def test_an_unusable_xgboost_is_one_line(
    tmp_path: Path, repository: Path, module: str, message: str
) -> None:
    (tmp_path / "xgboost.py").write_text(module)
    command = ["tune", "--workload", "matmul:m=64,n=64,k=64", "--device", "sim:a100"]
    done = subprocess.run(
        [sys.executable, "-m", "tvm_energy.cli", *command, "--work-dir", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert "pip install" in done.stderr
