"""The named workloads of ``tvm-energy workloads`` as Ansor tasks."""

from __future__ import annotations

from typing import Any

from tvm_energy.ansor.compat import load_auto_scheduler

# isort: split
from tvm import auto_scheduler

from tvm_energy.ansor.device import search_task
from tvm_energy.meta_schedule.workloads import parse_workload

load_auto_scheduler()


#: Name of `workload_tensors` in Ansor's workload keys.
REGISTERED_NAME = "tvm_energy.workload"


@auto_scheduler.register_workload(REGISTERED_NAME)
def workload_tensors(spec: str) -> list[Any]:
    """Inputs and output of a named workload, for Ansor's registry."""
    return parse_workload(spec).tensors()


def workload_task(spec: str, *, device: str = "auto", **stock: Any) -> Any:
    """An Ansor ``SearchTask`` for a named workload, such as ``matmul:m=256,n=256,k=256``.

    Args:
        spec: see ``tvm-energy workloads``.
        device, stock: as for `search_task`.

    Raises:
        ConfigurationError: there is no such workload or device.
    """
    workload = parse_workload(spec)
    stock.setdefault("desc", workload.spec)
    # The arguments keep the layout that the workload says. Ansor 0.17 also fails to rewrite topi's matmul.
    stock.setdefault("layout_rewrite_option", auto_scheduler.LayoutRewriteOption.NO_REWRITE)
    return search_task(REGISTERED_NAME, (workload.spec,), device=device, **stock)
