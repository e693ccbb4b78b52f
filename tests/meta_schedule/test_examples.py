"""The scripts in docs/examples run as they are, at small size."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from test_networks import saved, small_model

from tvm_energy.manifest import read_manifest

pytestmark = pytest.mark.tuning

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SMALL = ("--trials", "4", "--population", "16")


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    work_dir = tmp_path_factory.mktemp("operator")
    return work_dir, run("tune_operator.py", *SMALL, "--work-dir", work_dir)


def test_tuning_an_operator(operator: tuple[Path, str]) -> None:
    assert "J a launch" in operator[1]


def test_replay_and_deploy(operator: tuple[Path, str], tmp_path: Path) -> None:
    out = run("replay_and_deploy.py", operator[0], "--to", tmp_path / "deploy")
    assert "energy:slack=0.02" in out
    manifest = read_manifest(tmp_path / "deploy")
    assert manifest is not None
    assert len(manifest["kernels"]) == 1


def test_tuning_an_onnx_network(tmp_path: Path) -> None:
    model = saved(small_model(), tmp_path)
    onnx.checker.check_model(str(model))
    out = run("tune_onnx.py", model, *SMALL, "--kernels", "1", "--work-dir", tmp_path / "out")
    assert "fused_conv2d_add_relu: log" in out
    assert "max_pool2d: as written (the log has no such kernel)" in out
    assert "largest difference to ONNX Runtime" in out


def test_an_existing_script_with_three_lines_changed(tmp_path: Path) -> None:
    text = (EXAMPLES / "existing_script.py").read_text()
    assert [text.count(f"# ({number})") for number in (1, 2, 3)] == [1, 1, 1]
    assert "T.sblock" in run("existing_script.py", *SMALL[:2], "--work-dir", tmp_path / "out")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_tuning_a_torch_model(tmp_path: Path) -> None:
    out = run("tune_torch.py", *SMALL, "--work-dir", tmp_path / "out")
    assert float(out.rsplit(":", 1)[1]) < 1e-3
