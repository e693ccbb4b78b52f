"""What a scheduled kernel would do on a GPU: scheduled TIR -> `KernelWork`.

The module is lowered by TVM's own passes up to the point before loops are vectorised and unrolled, where
it is still short: threads, allocations, loops and index expressions stand there as they will run.
Then its statements are turned into the plain trees of `tvm_energy.simulation.loop_nest`.

What is not understood is not an error: an unknown function counts as one special operation, an index
that is not known (it is read from memory) as scattered, an unknown condition as true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.ir.transform import Sequential
from tvm.target import Target

from tvm_energy.meta_schedule.kernel_statements import DeviceCode
from tvm_energy.meta_schedule.tir_objects import (
    BufferNames,
    element_bytes,
    element_count,
    integer,
    is_kernel,
    sub_statements,
)
from tvm_energy.simulation.kernel import KernelLaunch, KernelRejected, KernelWork
from tvm_energy.simulation.loop_analysis import describe
from tvm_energy.simulation.loop_nest import Kernel

_MAX_LAUNCHES = 256
_GRID_LIMITS = {"blockIdx.x": 2**31 - 1, "blockIdx.y": 65535, "blockIdx.z": 65535}
_THREAD_LIMITS = {"threadIdx.x": 1024, "threadIdx.y": 1024, "threadIdx.z": 64}


def describe_kernel(mod: IRModule, target: Any) -> KernelWork:
    """What the scheduled module would do on a GPU.

    Args:
        mod: a candidate after MetaSchedule's post-processing, one function.
        target: the CUDA target it was scheduled for.

    Raises:
        KernelRejected: a CUDA compiler or the driver would refuse it; the message says why.
    """
    target = Target(target)
    function = _lower(mod, target)
    reader = _Reader(target, _dynamic_shared_bytes(function))
    reader.host(function.body)
    if not reader.kernels:
        raise KernelRejected(
            "the module binds no loop to GPU threads; schedule it for the target "
            f"{target.kind.name!r} first"
        )
    return KernelWork(launches=tuple(reader.kernels))


def _lower(mod: IRModule, target: Target) -> Any:
    """Run TVM's lowering (tvm.s_tir.pipeline) up to, not including, vectorising and unrolling."""
    bound = tirx.transform.BindTarget(target.with_host("llvm"))(mod)
    try:
        lowered = _lowering()(bound)
    except Exception as exc:
        raise KernelRejected(f"TVM cannot lower this schedule: {_last_line(exc)}") from exc
    functions = [item for item in lowered.functions.values() if isinstance(item, tirx.PrimFunc)]
    if len(functions) != 1:
        raise KernelRejected(f"expected one function in the module, got {len(functions)}")
    return functions[0]


def _lowering() -> Sequential:
    return Sequential(
        [
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerCrossThreadReduction(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.LiftThreadBinding(),
            s_tir.transform.ManifestSharedMemoryLocalStage(),
            s_tir.transform.CompactBufferAllocation(),
            s_tir.transform.LowerAutoCopy(),
            s_tir.transform.UnifyThreadBinding(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.StmtSimplify(),
            s_tir.transform.InjectPermutedLayout(),
            s_tir.transform.AnnotateIrregularLoop(),
            s_tir.transform.InjectSoftwarePipeline(),
            s_tir.transform.TransformMmaBufferLayout(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.NarrowDataType(32),
            s_tir.transform.ThreadSync("shared"),
            s_tir.transform.ThreadSync("shared.dyn"),
        ]
    )


def _last_line(exc: Exception) -> str:
    lines = [line for line in str(exc).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__


def _dynamic_shared_bytes(function: Any) -> list[int]:
    """Dynamic shared memory of each kernel, in order.

    Buffers that are never alive together share their place; TVM's own pass says how.
    """
    module = s_tir.transform.MergeSharedMemoryAllocations()(IRModule({"main": function}))
    return [sum(_dynamic_sizes(kernel)) for kernel in _kernel_bodies(module["main"].body)]


def _kernel_bodies(statement: Any) -> Iterator[Any]:
    if is_kernel(statement):
        yield statement
    else:
        for item in sub_statements(statement):
            yield from _kernel_bodies(item)


def _dynamic_sizes(statement: Any) -> Iterator[int]:
    if type(statement).__name__ == "AllocBuffer" and str(statement.buffer.scope()) == "shared.dyn":
        yield element_count(statement.buffer) * element_bytes(statement.buffer)
    for item in sub_statements(statement):
        yield from _dynamic_sizes(item)


class _Reader:
    """Walks the host code, and turns each kernel into a `KernelLaunch`."""

    def __init__(self, target: Target, dynamic_shared: list[int]) -> None:
        self.target = target
        self.dynamic_shared = dynamic_shared
        self.found = 0
        self.kernels: list[KernelLaunch] = []
        self.pragma_steps = 0
        self.names = BufferNames()

    def host(self, statement: Any) -> None:
        """Find the kernels in host code."""
        kind = type(statement).__name__
        if kind == "SeqStmt":
            for item in statement.seq:
                self.host(item)
        elif kind == "DeclBuffer":
            self.names.declare(statement)
        elif kind == "AttrStmt":
            if statement.attr_key == "pragma_auto_unroll_max_step":
                self.pragma_steps = integer(statement.value, 0)
            if is_kernel(statement):
                self._kernel(statement)
            else:
                self.host(statement.body)
        elif kind == "For":
            before = len(self.kernels)
            self.host(statement.body)
            again = self.kernels[before:] * (integer(statement.extent, 1) - 1)
            self.kernels += again[:_MAX_LAUNCHES]
        elif kind == "IfThenElse":
            self.host(statement.then_case)
        elif kind == "BufferStore":
            raise KernelRejected(
                f"host code writes to {statement.buffer.name!r}, which lies in GPU memory: "
                "a loop is not bound to threads"
            )

    def _kernel(self, statement: Any) -> None:
        name = f"kernel_{self.found}"
        device = DeviceCode(name, self.pragma_steps, self.names)
        self.pragma_steps = 0
        body = device.tree(statement)
        kernel = device.finish(body, self.dynamic_shared[self.found])
        self.found += 1
        self._check(device, kernel)
        self.kernels.append(describe(kernel))

    def _check(self, device: DeviceCode, kernel: Kernel) -> None:
        attrs = self.target.attrs
        threads = math.prod(kernel.threads.values())
        most = int(attrs.get("max_threads_per_block", attrs.get("max_num_threads", 1024)))
        if threads > most:
            raise KernelRejected(f"{threads} threads in a block, the target allows {most}")
        limit = int(attrs.get("max_shared_memory_per_block", 49152))
        if kernel.shared_bytes > limit:
            raise KernelRejected(
                f"{kernel.shared_bytes} bytes of shared memory in a block, the target allows {limit}"
            )
        for tag, extent in device.extents.items():
            highest = {**_GRID_LIMITS, **_THREAD_LIMITS}.get(tag)
            if highest is not None and extent > highest:
                raise KernelRejected(f"{tag} has {extent} values, CUDA allows {highest}")
            if extent < 1:
                raise KernelRejected(f"{tag} has no values")
