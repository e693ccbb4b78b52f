"""Builds the stand-in ``libnvidia-ml.so.1`` and runs Python with the real module pynvml on it.

The knobs are described at the top of ``nvml_standin.c``. Playback begins when NVML is initialised for
the first time, and again whenever its last user has shut it down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("nvml_standin.c")
TESTS = Path(__file__).resolve().parent.parent


def build_library(folder: Path) -> Path:
    """Compile the stand-in into a folder, for use as LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    compiler = os.environ.get("CC", "cc")
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return folder


def run_python(
    code: str, library: Path, knobs: str, folder: Path, **environment: str | None
) -> Any:
    """Run code in a new process on the stand-in; what it printed last, read as JSON.

    Args:
        code: Python source.
        library: folder from `build_library`.
        knobs: lines for the stand-in.
        folder: where the file of knobs may lie.
        environment: additional variables; None removes one.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=standin_environment(library, knobs, folder, **environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def standin_environment(
    library: Path, knobs: str, folder: Path, **environment: str | None
) -> dict[str, str]:
    """Environment variables under which any Python process finds the stand-in; see `run_python`."""
    path = folder / "knobs.txt"
    path.write_text(textwrap.dedent(knobs), encoding="utf-8")
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    variables |= {"LD_LIBRARY_PATH": str(library), "NVML_STANDIN": str(path)}
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    variables["TVM_ENERGY_LOCK_DIR"] = str(folder)
    for name, value in environment.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    return variables
