"""Energy-aware auto-scheduling for Apache TVM: find kernels that cost fewer joules.

Importing this package is light: TVM, xgboost and NVML are loaded when they are first needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tvm_energy.version import __version__

if TYPE_CHECKING:
    from tvm_energy.logs.load import load_log
    from tvm_energy.meta_schedule.tuning import options, tune_relax, tune_tir
    from tvm_energy.replay import summarize

__all__ = ["__version__", "load_log", "options", "summarize", "tune_relax", "tune_tir"]

_LAZY = {
    "load_log": "tvm_energy.logs.load",
    "options": "tvm_energy.meta_schedule.tuning",
    "summarize": "tvm_energy.replay",
    "tune_relax": "tvm_energy.meta_schedule.tuning",
    "tune_tir": "tvm_energy.meta_schedule.tuning",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Load a public function on first use."""
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
