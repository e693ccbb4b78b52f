"""Energy-aware tuning with legacy Ansor, ``tvm.auto_scheduler`` of TVM up to 0.19.

The same session, objectives, energy model, policies, meters and records as under MetaSchedule; only what
Ansor calls is written for it. ``docs/ansor.md`` shows an Ansor user's script before and after.
Importing this package loads no TVM; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_energy.ansor.callback import EnergyMeasureCallback
    from tvm_energy.ansor.cost_model import EnergyCostModel
    from tvm_energy.ansor.device import open_device, search_task
    from tvm_energy.ansor.logs import apply_best, export_log
    from tvm_energy.ansor.measuring import measuring_on
    from tvm_energy.ansor.tuning import tune
    from tvm_energy.ansor.workloads import workload_task

__all__ = [
    "EnergyCostModel",
    "EnergyMeasureCallback",
    "apply_best",
    "export_log",
    "measuring_on",
    "open_device",
    "search_task",
    "tune",
    "workload_task",
]

_MODULES = {
    "EnergyCostModel": "cost_model",
    "EnergyMeasureCallback": "callback",
    "apply_best": "logs",
    "export_log": "logs",
    "measuring_on": "measuring",
    "open_device": "device",
    "search_task": "device",
    "tune": "tuning",
    "workload_task": "workloads",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
