"""A network as a chain of blocks: where it can be cut, what crosses, what each block does.

Rule. The bindings of the lowered Relax function run one after the other. Between two of them the
network can be cut when exactly one tensor that is computed from the input is still needed
(constants are known on both sides; a reshape is another view of the same tensor; a cut that returns to
such a view is none). Pieces between neighbouring cuts are joined from left to right until a block
holds at least 1 / ``most`` of the network's work; a short rest joins the last block. Work is
max(flop, 10 bytes) of a kernel: on the GPUs that we know a byte of memory traffic takes about as long as
ten operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule.networks import Network, apply_default_schedule, lower
from tvm_energy.simulation.devices import DeviceSpec
from tvm_energy.simulation.gpu import simulate
from tvm_energy.simulation.kernel import KernelWork

if TYPE_CHECKING:
    from tvm.target import Target

__all__ = [
    "Block",
    "BlockTimes",
    "blocks_of",
    "describe_blocks",
    "divide",
    "simulated_network",
    "time_blocks",
]

#: Operations that take as long as one byte of memory traffic (rounded; A100: 12.5).
_OPERATIONS_PER_BYTE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive kernels of a network.

    Attributes:
        name: its number and its first kernel.
        kernels: TIR functions in the order of their calls; a function may come more than once.
        input_bytes, output_bytes: the tensors that cross its two cuts.
        flop: operations of one run, as TVM counts them.
    """

    name: str
    kernels: tuple[str, ...]
    input_bytes: int
    output_bytes: int
    flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Simulated cost of blocks over clocks.

    Attributes:
        clocks_mhz: (n,).
        latency_s, energy_j: (blocks, n), each block simulated by itself.
        whole_latency_s, whole_energy_j: (n,), all kernels of the network as one work.
    """

    clocks_mhz: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    energy_j: NDArray[np.float64]
    whole_latency_s: NDArray[np.float64] = field(repr=False)
    whole_energy_j: NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Step:
    """One binding: what it defines, what it reads, and the kernel it calls (None for a view)."""

    defines: int
    reads: tuple[int, ...]
    kernel: str | None
    output_bytes: int


def blocks_of(network: Network, target: Target, most: int = 16) -> tuple[list[Block], Any]:
    """Divide a network; also returns the lowered module that holds the kernels.

    Args:
        network: from `load_onnx`.
        target: of the device; decides how the network is lowered.
        most: upper limit of the number of blocks.

    Raises:
        ConfigurationError: ``most`` below 1, or a network without kernels or of several functions.
    """
    if most < 1:
        raise ConfigurationError(f"a network has at least 1 block, got {most}")
    module = lower(network, target)
    steps, inputs, outputs = _steps(module)
    work = {
        name: (_flop(module, name), _bytes(module, name))
        for name in {step.kernel for step in steps if step.kernel}
    }
    if not work:
        raise ConfigurationError(f"network {network.name!r} has no kernel to run")
    sizes = [
        max(work[step.kernel][0], _OPERATIONS_PER_BYTE * work[step.kernel][1])
        if step.kernel
        else 0.0
        for step in steps
    ]
    cuts = _cuts(steps, inputs, outputs)
    ends = divide(sizes, [at for at, _ in cuts], most)
    crossing = {0: sum(inputs.values()), **dict(cuts)}
    crossing[len(steps)] = sum(steps[_index(steps, value)].output_bytes for value in outputs)
    blocks: list[Block] = []
    start = 0
    for end in ends:
        kernels = tuple(step.kernel for step in steps[start:end] if step.kernel)
        blocks.append(
            Block(
                name=f"{len(blocks)}:{kernels[0]}",
                kernels=kernels,
                input_bytes=crossing[start],
                output_bytes=crossing[end],
                flop=sum(work[kernel][0] for kernel in kernels),
            )
        )
        start = end
    return blocks, module


def divide(sizes: Sequence[float], cuts: Sequence[int], most: int) -> list[int]:
    """Ends of blocks: cuts at which enough work has come together, and the end of all.

    Args:
        sizes: work of each step.
        cuts: numbers of steps after which one may cut, ascending.
        most: a block holds at least 1 / most of the work, the last one too.
    """
    total = float(sum(sizes))
    share = total / most * (1 - 1e-9)  # sums in another order
    ends, start = [], 0
    for cut in cuts:
        done, rest = float(sum(sizes[start:cut])), float(sum(sizes[cut:]))
        if done > 0 and done >= share and rest > 0 and rest >= share:
            ends.append(cut)
            start = cut
    return [*ends, len(sizes)]


def describe_blocks(blocks: Sequence[Block], module: Any, target: Target) -> list[KernelWork]:
    """What each block does on a GPU, every kernel with TVM's default GPU schedule (``dlight``).

    Raises:
        TvmEnergyError: a kernel has no default schedule, or a GPU would refuse it.
    """
    from tvm import transform
    from tvm.ir import IRModule

    from tvm_energy.meta_schedule.kernel_description import describe_kernel

    with target, transform.PassContext(opt_level=3):
        scheduled = apply_default_schedule(module, target)
    works = {
        name: describe_kernel(IRModule({"main": scheduled[name]}), target)
        for name in {kernel for block in blocks for kernel in block.kernels}
    }
    return [
        KernelWork(
            launches=tuple(launch for name in block.kernels for launch in works[name].launches)
        )
        for block in blocks
    ]


def simulated_network(
    network: Network, spec: DeviceSpec, most: int = 16
) -> tuple[list[Block], list[KernelWork], BlockTimes]:
    """Divide a network for a simulated device, describe the blocks, and simulate them there."""
    from tvm.target import Target

    target = Target(spec.target)
    blocks, module = blocks_of(network, target, most)
    works = describe_blocks(blocks, module, target)
    return blocks, works, time_blocks(works, spec)


def time_blocks(works: Sequence[KernelWork], spec: DeviceSpec, seed: int = 0) -> BlockTimes:
    """Simulate each block by itself, and all together, at every clock of a device."""
    whole = KernelWork(launches=tuple(launch for work in works for launch in work.launches))
    clocks = np.array(spec.clocks_mhz)
    times = np.empty((2, len(works) + 1, len(clocks)))
    for row, work in enumerate([*works, whole]):
        for column, clock in enumerate(clocks):
            truth = simulate(spec, work, clock_mhz=float(clock), seed=seed)
            times[:, row, column] = truth.latency_s, truth.energy_j
    return BlockTimes(
        clocks_mhz=clocks,
        latency_s=times[0, :-1],
        energy_j=times[1, :-1],
        whole_latency_s=times[0, -1],
        whole_energy_j=times[1, -1],
    )


# ---- reading the graph --------------------------------------------------------------------------


def _steps(module: Any) -> tuple[list[_Step], dict[int, int], set[int]]:
    """Bindings in order; inputs with their bytes; values that are returned. Values are numbers."""
    from tvm import relax

    function = module["main"]
    numbers: dict[Any, int] = {}
    same: dict[int, int] = {}  # a view or tuple of one value -> that value

    def number(variable: Any) -> int:
        for known, value in numbers.items():
            if known.same_as(variable):
                return value
        return numbers.setdefault(variable, len(numbers))

    def reads(expression: Any) -> tuple[int, ...]:
        found = (number(variable) for variable in _variables(expression))
        return tuple(dict.fromkeys(same.get(value, value) for value in found))

    inputs = {number(parameter): _tensor_bytes(parameter) for parameter in function.params}
    body = function.body
    if not isinstance(body, relax.SeqExpr):
        raise ConfigurationError("the network computes nothing")
    steps = []
    for binding in (item for block in body.blocks for item in block.bindings):
        value, used = binding.value, reads(binding.value)
        defined = number(binding.var)
        kernel = _kernel(value)
        if kernel is None and len(used) == 1:
            same[defined] = used[0]
        else:
            steps.append(_Step(defined, used, kernel, _tensor_bytes(binding.var)))
    return steps, inputs, set(reads(body.body))


def _variables(expression: Any) -> Iterator[Any]:
    from tvm import relax

    if isinstance(expression, relax.Var):
        yield expression
    elif isinstance(expression, relax.Call):
        for argument in expression.args:
            yield from _variables(argument)
    elif isinstance(expression, relax.Tuple):
        for item in expression.fields:
            yield from _variables(item)
    elif isinstance(expression, relax.TupleGetItem):
        yield from _variables(expression.tuple_value)


def _kernel(value: Any) -> str | None:
    """The TIR function that a binding calls."""
    from tvm.ir import GlobalVar, Op

    is_call = isinstance(getattr(value, "op", None), Op) and value.op.name == "relax.call_tir"
    return value.args[0].name_hint if is_call and isinstance(value.args[0], GlobalVar) else None


def _tensor_bytes(expression: Any) -> int:
    """Bytes of a tensor or of a tuple of them; 0 for what has no fixed size."""
    return _type_bytes(getattr(expression, "ty", None) or expression.struct_info)


def _type_bytes(type_: Any) -> int:
    fields = getattr(type_, "fields", None)
    if fields is not None:
        return sum(_type_bytes(item) for item in fields)
    shape = getattr(type_, "shape", None)
    if shape is None:
        return 0
    try:
        count = int(np.prod([int(size) for size in shape], dtype=np.int64))
    except (TypeError, ValueError):
        return 0
    return count * int(np.dtype(str(type_.dtype)).itemsize)


def _cuts(
    steps: Sequence[_Step], inputs: dict[int, int], outputs: set[int]
) -> list[tuple[int, int]]:
    """(number of steps before the cut, bytes that cross) wherever one computed tensor crosses."""
    last_use: dict[int, int] = {}
    for index, step in enumerate(steps):
        for value in step.reads:
            last_use[value] = index
    for value in outputs:
        last_use[value] = len(steps)
    cuts = []
    live = set(inputs)
    for index, step in enumerate(steps[:-1]):
        live.add(step.defines)
        live = {value for value in live if last_use.get(value, -1) > index}
        if len(live) == 1:
            (value,) = live
            if value not in inputs:
                cuts.append((index + 1, steps[_index(steps, value)].output_bytes))
    return cuts


def _index(steps: Sequence[_Step], value: int) -> int:
    return next(index for index, step in enumerate(steps) if step.defines == value)


def _flop(module: Any, name: str) -> float:
    from tvm.ir import IRModule
    from tvm.s_tir.analysis import estimate_tir_flops

    return float(estimate_tir_flops(IRModule({"main": module[name]})))


def _bytes(module: Any, name: str) -> int:
    """Bytes of all arguments of a kernel, each once."""
    return sum(_buffer_bytes(item) for item in module[name].params if hasattr(item, "shape"))


def _buffer_bytes(buffer: Any) -> int:
    sizes = [int(size) for size in buffer.shape]
    return int(np.prod(sizes, dtype=np.int64)) * int(np.dtype(str(buffer.dtype)).itemsize)
