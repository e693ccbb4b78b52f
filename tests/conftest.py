"""Shared fixtures; light on purpose: nothing here imports TVM."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
