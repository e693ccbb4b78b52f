"""The stand-in NVML library, built once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import build_library, run_python


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the stand-in ``libnvidia-ml.so.1``."""
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("needs a C compiler")
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def on_standin(standin_library: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run Python with the real pynvml on the stand-in: ``on_standin(code, knobs, **environment)``."""

    def run(code: str, knobs: str = "", **environment: str | None) -> Any:
        return run_python(code, standin_library, knobs, tmp_path, **environment)

    return run
