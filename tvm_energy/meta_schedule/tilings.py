"""Tile sizes of a design space that a GPU can run, told from the decisions alone.

MetaSchedule draws tile sizes blindly: it applies a trace, lowers the kernel, and only then finds out (in its
postprocessor ``VerifyGPUCode``) that it has 4 threads or wants 200 KB of shared memory. Of random traces of
CUDA's design space at most 10 % survive. Both figures follow from tile sizes: the threads of a block are the
product of those bound to ``threadIdx``; a buffer in shared memory covers what the block reads while the loops
inside its place run. So they are worked out here beforehand, for thousands of draws at a time.

What a trace does beyond what is understood here is not judged: such a kernel passes, and TVM decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm.s_tir.schedule import Schedule

from tvm_energy.kernels.tir_objects import element_bytes

Ints = npt.NDArray[np.int64]

#: Draws that are looked at together, and how often, before it is concluded that hardly any fit.
_CHUNK = 2048
_MOST_CHUNKS = 64

#: Part of a tiling: which tiling of the trace, and which of its sizes.
Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tiling:
    """One ``SamplePerfectTile`` instruction.

    Attributes:
        instruction: its position in the trace.
        extent: product of the sizes.
        parts: how many sizes.
        innermost: largest last size.
    """

    instruction: int
    extent: int
    parts: int
    innermost: int


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A copy of a buffer in shared memory.

    Attributes:
        bytes: of one element, times the copies that a software pipeline keeps.
        dims: for each dimension, what it covers: (1 + sum of coefficient x (extent of the parts - 1)).
    """

    bytes: int
    dims: tuple[tuple[tuple[int, tuple[Part, ...], int], ...], ...]


@dataclass
class _Reading:
    """What has been understood of a trace so far."""

    tilings: list[Tiling] = field(default_factory=list)
    axis: dict[Any, tuple[Any, int]] = field(default_factory=dict)  # loop -> block, position
    tiled: dict[tuple[Any, int], int] = field(default_factory=dict)  # axis -> tiling
    sizes: dict[Any, Part] = field(default_factory=dict)
    loops: dict[Any, tuple[Part, ...]] = field(default_factory=dict)
    bound: dict[Part, str] = field(default_factory=dict)
    order: dict[Part, int] = field(default_factory=dict)
    copies: dict[Any, tuple[Any, int]] = field(default_factory=dict)  # block -> block read, index
    places: dict[Any, Any] = field(default_factory=dict)
    low: int = 1
    high: int | None = None
    stages: int = 1


class Tilings:
    """The tile sizes of one design space, and which of them a target can run.

    Args:
        module: the workload.
        trace: of the design space.
        target: its limits on threads and shared memory count; a CPU has none.
    """

    def __init__(self, module: Any, trace: Any, target: Any) -> None:
        self._threads_high = _limit(target, "max_threads_per_block", "max_num_threads")
        self._shared = _limit(target, "max_shared_memory_per_block")
        reading = _read(trace)
        self.tilings = tuple(reading.tilings)
        self._threads = [
            tuple(part for part, name in reading.bound.items() if name == axis)
            for axis in ("threadIdx.x", "threadIdx.y", "threadIdx.z")
        ]
        self._low = reading.low
        self._high = reading.high
        self._buffers = tuple(_buffers(module, trace, reading)) if self._shared else ()

    def draw(self, rng: np.random.Generator, count: int) -> list[dict[int, list[int]]]:
        """Up to `count` draws that fit: sizes by the position of their instruction in the trace.

        Each tiling's sizes are drawn evenly among those of its extent. Fewer come where hardly any fit.
        """
        if not self.tilings:
            return [{} for _ in range(count)]
        found: list[dict[int, list[int]]] = []
        for _ in range(_MOST_CHUNKS):
            if len(found) >= count:
                break
            draws = [_draw(tiling, rng, _CHUNK) for tiling in self.tilings]
            for row in np.flatnonzero(self.fit(draws))[: count - len(found)]:
                found.append(
                    {
                        tiling.instruction: [int(size) for size in sizes[row]]
                        for tiling, sizes in zip(self.tilings, draws, strict=True)
                    }
                )
        return found

    def fit(self, sizes: Sequence[Ints]) -> npt.NDArray[np.bool_]:
        """Which draws fit, shape (n,).

        Args:
            sizes: for each tiling, shape (n, parts).
        """
        count = len(sizes[0]) if sizes else 1
        good = np.ones(count, dtype=bool)
        for tiling, drawn in zip(self.tilings, sizes, strict=True):
            good &= drawn[:, -1] <= tiling.innermost
        block = np.ones(count, dtype=np.int64)
        for axis, parts in enumerate(self._threads):
            threads = _product(parts, sizes, count)
            block *= threads
            if axis == 0 and parts:
                good &= threads >= self._low
                if self._high is not None:
                    good &= threads <= self._high
        if self._threads_high:
            good &= block <= self._threads_high
        if self._buffers:
            total = sum(_bytes(buffer, sizes, count) for buffer in self._buffers)
            good &= total <= self._shared
        return good

    def fits(self, trace: Any) -> bool:
        """The same of one trace of this design space that has its decisions."""
        instructions = trace.insts
        sizes = []
        for tiling in self.tilings:
            decision = trace.get_decision(instructions[tiling.instruction])
            if decision is None:
                return True
            sizes.append(np.array([[int(size) for size in decision]], dtype=np.int64))
        return bool(self.fit(sizes)[0])


def _limit(target: Any, *names: str) -> int:
    """A limit of the target; 0 for none."""
    for name in names:
        value = target.attrs.get(name)
        if value is not None:
            return int(value)
    return 0


def _product(parts: Sequence[Part], sizes: Sequence[Ints], count: int) -> Ints:
    product = np.ones(count, dtype=np.int64)
    for tiling, part in parts:
        product = product * sizes[tiling][:, part]
    return product


def _bytes(buffer: SharedBuffer, sizes: Sequence[Ints], count: int) -> Ints:
    elements = np.full(count, buffer.bytes, dtype=np.int64)
    for terms in buffer.dims:
        covered = np.ones(count, dtype=np.int64)
        for coefficient, parts, whole in terms:
            extent = _product(parts, sizes, count) * whole
            covered = covered + coefficient * (extent - 1)
        elements = elements * covered
    return elements


def _draw(tiling: Tiling, rng: np.random.Generator, count: int) -> Ints:
    """Sizes whose product is the extent, evenly among all of them, shape (count, parts)."""
    sizes = np.ones((count, tiling.parts), dtype=np.int64)
    for prime, power in _factors(tiling.extent).items():
        # Even compositions of `power` into parts: bars among stars.
        bars = np.argsort(rng.random((count, power + tiling.parts - 1)), axis=1)
        bars = np.sort(bars[:, : tiling.parts - 1], axis=1)
        edges = np.column_stack(
            [np.full(count, -1), bars, np.full(count, power + tiling.parts - 1)]
        )
        sizes *= prime ** (np.diff(edges, axis=1) - 1)
    return sizes


def _factors(number: int) -> dict[int, int]:
    """Prime factors and their powers."""
    factors: dict[int, int] = {}
    prime = 2
    while number > 1:
        if prime * prime > number:
            prime = number
        while number % prime == 0:
            factors[prime] = factors.get(prime, 0) + 1
            number //= prime
        prime += 1
    return factors


def _read(trace: Any) -> _Reading:
    """Follow loops and sizes through a trace."""
    reading = _Reading()
    for position, instruction in enumerate(trace.insts):
        kind = str(instruction.kind.name)
        if kind == "EnterPostproc":
            break
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(reading, trace, position, instruction)
    return reading


def _get_loops(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    block = instruction.inputs[0]
    for number, loop in enumerate(instruction.outputs):
        reading.axis[loop] = (block, number)


def _sample_tile(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    decision = trace.get_decision(instruction)
    if decision is None:
        return
    parts, innermost = (int(value) for value in instruction.attrs[:2])
    tiling = Tiling(position, math.prod(int(size) for size in decision), parts, innermost)
    number = len(reading.tilings)
    reading.tilings.append(tiling)
    axis = reading.axis.get(instruction.inputs[0])
    if axis is not None:
        reading.tiled[axis] = number
    for part, size in enumerate(instruction.outputs):
        reading.sizes[size] = (number, part)


def _split(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    factors = list(instruction.inputs)[1:]
    for loop, factor in zip(instruction.outputs, factors, strict=False):
        if factor in reading.sizes:
            reading.loops[loop] = (reading.sizes[factor],)


def _reorder(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    for number, loop in enumerate(instruction.inputs):
        for part in reading.loops.get(loop, ()):
            reading.order[part] = number


def _fuse(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    parts = [reading.loops.get(loop, ()) for loop in instruction.inputs]
    reading.loops[instruction.outputs[0]] = tuple(part for group in parts for part in group)


def _bind(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    for part in reading.loops.get(instruction.inputs[0], ()):
        reading.bound[part] = str(instruction.attrs[0])


def _cache_read(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    if str(instruction.attrs[1]).startswith("shared"):
        reading.copies[instruction.outputs[0]] = (instruction.inputs[0], int(instruction.attrs[0]))


def _compute_at(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    reading.places[instruction.inputs[0]] = instruction.inputs[1]


def _annotate(reading: _Reading, trace: Any, position: int, instruction: Any) -> None:
    name = str(instruction.attrs[0])
    if name == "meta_schedule.thread_extent_low_inclusive":
        reading.low = int(instruction.inputs[1])
    elif name == "meta_schedule.thread_extent_high_inclusive":
        reading.high = int(instruction.inputs[1])
    elif name == "software_pipeline_stage":
        reading.stages = 1 + max(int(stage) for stage in instruction.inputs[1])


_HANDLERS = {
    "GetLoops": _get_loops,
    "SamplePerfectTile": _sample_tile,
    "Split": _split,
    "Reorder": _reorder,
    "Fuse": _fuse,
    "Bind": _bind,
    "CacheRead": _cache_read,
    "ComputeAt": _compute_at,
    "Annotate": _annotate,
}


def _buffers(module: Any, trace: Any, reading: _Reading) -> Iterator[SharedBuffer]:
    """The buffers in shared memory whose size follows from tile sizes."""
    names = {
        instruction.outputs[0]: str(instruction.attrs[0])
        for instruction in trace.insts
        if str(instruction.kind.name) == "GetSBlock"
    }
    schedule = Schedule(module, debug_mask="none")
    for copy, (reader, index) in reading.copies.items():
        place = reading.places.get(copy)
        parts = reading.loops.get(place, ())
        if reader not in names or len(parts) != 1 or parts[0] not in reading.order:
            continue
        block = schedule.get(schedule.get_sblock(names[reader], func_name="main"))
        buffer = _buffer(block, index, reader, reading, reading.order[parts[0]])
        if buffer is not None:
            yield buffer


def _buffer(
    block: Any, index: int, reader: Any, reading: _Reading, place: int
) -> SharedBuffer | None:
    """What a block reads of one buffer while the loops inside `place` run."""
    extents: dict[int, tuple[tuple[Part, ...], int]] = {}
    for number, axis in enumerate(block.iter_vars):
        tiling = reading.tiled.get((reader, number))
        if tiling is None:
            extents[number] = ((), int(axis.dom.extent))
            continue
        if reading.tilings[tiling].extent != int(axis.dom.extent):
            return None
        extents[number] = (
            tuple(
                (tiling, part)
                for part in range(reading.tilings[tiling].parts)
                if _inside((tiling, part), reading, place)
            ),
            1,
        )
    numbers = {hash(axis.var): number for number, axis in enumerate(block.iter_vars)}
    read = block.reads[index]
    dims = []
    for interval in read.region:
        found = _coefficients(interval.min)
        if found is None or not found.keys() <= numbers.keys():
            return None
        terms: list[tuple[int, tuple[Part, ...], int]] = [(1, (), int(interval.extent))]
        terms += [(abs(found[each]), *extents[numbers[each]]) for each in found]
        dims.append(tuple(terms))
    return SharedBuffer(bytes=element_bytes(_buffer_of(read)) * reading.stages, dims=tuple(dims))


def _coefficients(index: Any) -> dict[int, int] | None:
    """Coefficient of each variable, by its hash, in a sum of multiples; None for anything else."""
    kind = type(index).__name__
    if kind == "Var":
        return {hash(index): 1}
    if kind == "IntImm":
        return {}
    if kind in ("Add", "Sub"):
        left, right = _coefficients(index.a), _coefficients(index.b)
        if left is None or right is None:
            return None
        sign = 1 if kind == "Add" else -1
        return {
            each: left.get(each, 0) + sign * right.get(each, 0)
            for each in left.keys() | right.keys()
        }
    if kind == "Mul":
        for factor, other in ((index.a, index.b), (index.b, index.a)):
            if type(factor).__name__ == "IntImm":
                inner = _coefficients(other)
                return inner and {each: int(factor) * value for each, value in inner.items()}
    return None


def _inside(part: Part, reading: _Reading, place: int) -> bool:
    """Whether a loop runs within one block of threads, inside the place of a copy."""
    name = reading.bound.get(part, "")
    if name.startswith("blockIdx"):
        return False
    if name:
        return True  # vthread, threadIdx: all threads of the block share the copy
    return reading.order.get(part, place + 1) > place


def _buffer_of(region: Any) -> Any:
    """The buffer of a region: TVM 0.27 calls it ``source``, 0.26 ``buffer``."""
    return region.buffer if hasattr(region, "buffer") else region.source
