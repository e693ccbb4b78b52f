"""Lowered code of a GPU function, host part included: TIR -> `KernelWork`.

What is read is TIR after lowering and before loops are vectorised and unrolled; how a schedule gets there
differs between tuners and stands in the adapters.

What is not understood is not an error: an unknown function counts as one special operation, an index
that is not known (it is read from memory) as scattered, an unknown condition as true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm_energy.kernels.statements import DeviceCode
from tvm_energy.kernels.tir_objects import BufferNames, integer, is_kernel
from tvm_energy.simulation.kernel import KernelLaunch, KernelRejected, KernelWork
from tvm_energy.simulation.loop_analysis import describe
from tvm_energy.simulation.loop_nest import Kernel

_MAX_LAUNCHES = 256
_GRID_LIMITS = {"blockIdx.x": 2**31 - 1, "blockIdx.y": 65535, "blockIdx.z": 65535}
_THREAD_LIMITS = {"threadIdx.x": 1024, "threadIdx.y": 1024, "threadIdx.z": 64}


def read_gpu_code(body: Any, target: Any, dynamic_shared: Sequence[int] = ()) -> KernelWork:
    """What the code would do on a GPU.

    Args:
        body: lowered body of the one function.
        target: the CUDA target it was scheduled for; limits are read from its attributes.
        dynamic_shared: bytes of dynamic shared memory of each kernel, in order; empty for none.

    Raises:
        KernelRejected: a CUDA compiler or the driver would refuse it; the message says why.
    """
    reader = _Reader(target, dynamic_shared)
    reader.host(body)
    if not reader.kernels:
        raise KernelRejected(
            "the module binds no loop to GPU threads; schedule it for the target "
            f"{target.kind.name!r} first"
        )
    return KernelWork(launches=tuple(reader.kernels))


def not_lowered(exc: Exception) -> KernelRejected:
    """TVM's failure to lower a schedule, in one sentence."""
    lines = [line for line in str(exc).splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else type(exc).__name__
    return KernelRejected(f"TVM cannot lower this schedule: {reason}")


class _Reader:
    """Walks the host code, and turns each kernel into a `KernelLaunch`."""

    def __init__(self, target: Any, dynamic_shared: Sequence[int]) -> None:
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
            self._inside(statement)
        elif kind in ("Allocate", "LetStmt", "AssertStmt"):
            self._inside(statement)
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

    def _inside(self, statement: Any) -> None:
        """The body of a statement that has one in some versions of TVM only."""
        body = getattr(statement, "body", None)
        if body is not None:
            self.host(body)

    def _kernel(self, statement: Any) -> None:
        name = f"kernel_{self.found}"
        device = DeviceCode(name, self.pragma_steps, self.names)
        self.pragma_steps = 0
        body = device.tree(statement)
        dynamic = self.dynamic_shared[self.found] if self.dynamic_shared else 0
        kernel = device.finish(body, dynamic)
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
