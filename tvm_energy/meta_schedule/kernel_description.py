"""What a scheduled kernel would do on a GPU: scheduled TIR -> `KernelWork`.

The module is lowered by TVM's own passes up to the point before loops are vectorised and unrolled, where
it is still short: threads, allocations, loops and index expressions stand there as they will run.
Then its statements are turned into the plain trees of `tvm_energy.simulation.loop_nest`.

What is not understood is not an error: an unknown function counts as one special operation, an index
that is not known (it is read from memory) as scattered, an unknown condition as true.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.ir.transform import Sequential
from tvm.target import Target

from tvm_energy.kernels.gpu_code import not_lowered, read_gpu_code
from tvm_energy.kernels.tir_objects import element_bytes, element_count, is_kernel, sub_statements
from tvm_energy.simulation.kernel import KernelRejected, KernelWork


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
    return read_gpu_code(function.body, target, _dynamic_shared_bytes(function))


def _lower(mod: IRModule, target: Target) -> Any:
    """Run TVM's lowering (tvm.s_tir.pipeline) up to, not including, vectorising and unrolling."""
    bound = tirx.transform.BindTarget(target.with_host("llvm"))(mod)
    try:
        lowered = _lowering()(bound)
    except Exception as exc:
        raise not_lowered(exc) from exc
    functions = [item for item in lowered.functions.values() if isinstance(item, tirx.PrimFunc)]
    if len(functions) != 1:
        raise KernelRejected(f"expected one function in the module, got {len(functions)}")
    return functions[0]


def _lowering() -> Sequential:
    # TVM 0.26 has one simplifier for both levels; 0.27 gave schedulable TIR its own.
    simplify = getattr(s_tir.transform, "StmtSimplify", tirx.transform.StmtSimplify)
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
            simplify(),
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
