from __future__ import annotations

import subprocess
import sys

import pytest

from tvm_energy.meta_schedule.compat import version_problem


@pytest.mark.parametrize("tvm", ["0.26.0", "0.27.0", "0.27.0.post1"])
@pytest.mark.parametrize("ffi", ["0.1.14", "0.1.14.post0", "0.1.14.post1"])
def test_working_pairs(tvm: str, ffi: str) -> None:
    assert version_problem(tvm, ffi) is None


@pytest.mark.parametrize(
    ("tvm", "ffi", "text"),
    [
        ("0.27.0.post1", "0.1.15.post2", "segmentation fault"),
        ("0.26.0", "0.1.12", "segmentation fault"),
        ("0.25.0", "0.1.12", "not supported"),
        ("0.28.0", "0.1.14", "not supported"),
        (None, "0.1.14", "apache-tvm is not installed"),
        ("0.27.0", None, "apache-tvm-ffi is not installed"),
    ],
)
def test_bad_pairs_are_named_with_the_remedy(tvm: str | None, ffi: str | None, text: str) -> None:
    problem = version_problem(tvm, ffi)
    assert problem is not None
    assert text in problem
    assert "pip install" in problem


def test_a_bad_pair_is_refused_before_tvm_is_loaded() -> None:
    script = """
import importlib.metadata as metadata, sys
real = metadata.version
metadata.version = lambda name: "0.1.15.post2" if name == "apache-tvm-ffi" else real(name)
import tvm_energy
try:
    tvm_energy.tune_tir
except ImportError as exc:
    print(exc)
print("tvm" in sys.modules)
"""
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert "would crash this process" in output
    assert output.strip().endswith("False")
