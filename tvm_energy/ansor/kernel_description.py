"""What a program of Ansor would do on a GPU: a TE schedule -> `KernelWork`.

As for MetaSchedule, TVM's own passes lower it up to the point before loops are vectorised and
unrolled; `tvm_energy.kernels.gpu_code` reads the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tir
from tvm.driver.build_module import schedule_to_module
from tvm.ir.transform import Sequential
from tvm.target import Target

from tvm_energy.kernels.gpu_code import not_lowered, read_gpu_code
from tvm_energy.simulation.kernel import KernelWork

# TVM aligns flattened rows to cache lines of this many bytes where nothing else is asked for.
_CACHE_LINE_BYTES = 64


def describe_kernel(schedule: Any, tensors: Sequence[Any], target: Any) -> KernelWork:
    """What the scheduled computation would do on a GPU.

    Args:
        schedule: a ``te.Schedule`` with its loops bound to threads.
        tensors: the arguments of the kernel.
        target: the CUDA target it was scheduled for.

    Raises:
        KernelRejected: a CUDA compiler or the driver would refuse it; the message says why.
    """
    target = Target(target)
    try:
        module = _lowering(target)(schedule_to_module(schedule, tensors))
    except Exception as exc:
        raise not_lowered(exc) from exc
    return read_gpu_code(module["main"].body, target)


def _lowering(target: Target) -> Sequential:
    """The first half of ``tvm.lower``, and the barriers that ``tvm.build`` adds."""
    return Sequential(
        [
            tir.transform.InjectPrefetch(),
            tir.transform.StorageFlatten(_CACHE_LINE_BYTES, False),
            tir.transform.BF16ComputeLegalize(),
            tir.transform.NarrowDataType(32),
            tir.transform.Simplify(),
            tir.transform.Apply(lambda function: function.with_attr("target", target)),
            tir.transform.ThreadSync("shared"),
        ]
    )
