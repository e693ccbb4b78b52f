"""Shared fixtures; light on purpose: nothing here imports TVM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# These need a TVM that has Ansor; scripts/test runs them in an environment of its own.
collect_ignore = ["ansor"] if importlib.util.find_spec("tvm_ffi") else []


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
