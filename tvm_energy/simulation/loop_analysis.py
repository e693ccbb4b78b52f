"""From the loops of a kernel to what it asks of the hardware (`KernelLaunch`). No compiler needed.

A kernel is a tree of loops, branches and statements, as a compiler sees it before it unrolls.
What a CUDA compiler would do next is assumed as follows; each assumption is ours:

- A loop is unrolled when the statements that this makes stay within the pragma's limit, or within
  `COMPILER_UNROLL_STEPS`. Virtual threads and vector loops always are.
- Inside an unrolled region, an address is loaded once, and shared-memory loads of contiguous aligned
  elements become one access of up to 16 bytes. Global loads become wide only where the schedule
  says "vectorize", since the compiler does not know how the argument pointers are aligned.
- What a loop does not change is moved out of it.
- Local arrays are registers when all their indices are known after unrolling, else thread-local memory.
- A multiplication feeding an addition is fused.

Frequencies of branches, sectors per request and bank conflicts come from evaluating the index
expressions for `SAMPLES` warps, spread evenly over blocks, warps and iterations, always the same ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.simulation import addresses
from tvm_energy.simulation.addresses import Node
from tvm_energy.simulation.kernel import (
    SECTOR_BYTES,
    WARP_SIZE,
    Curve,
    GlobalAccess,
    Instructions,
    KernelLaunch,
    SharedTraffic,
)
from tvm_energy.simulation.loop_nest import (
    LANE,
    Access,
    Branch,
    Kernel,
    Loop,
    Statement,
    Tree,
    extent,
    has_barrier,
    stays_loop,
    stored_indices,
    unrolled_loops,
    virtual_threads,
)

PARTIAL_UNROLL = 4  # estimate: nvcc unrolls other innermost loops by four
SAMPLES = 64
MAX_VECTOR_BYTES = 16  # widest load or store of one thread (PTX ISA: .v4.b32)
MAX_REGISTERS = 255
BASE_REGISTERS = 22  # estimate: addresses, counters, temporaries
MAX_ILP = 8.0
MAX_LOADS_IN_FLIGHT = 16.0
RESIDENT_BLOCKS = 512  # estimate: blocks on the whole device at a time, for thread-local memory
_GRID_LIMIT = 4096


def describe(kernel: Kernel) -> KernelLaunch:
    """What one launch of the kernel asks of the hardware."""
    return _Analysis(kernel).launch()


@dataclass(frozen=True)
class _Leaf:
    """A statement with what surrounds it."""

    statement: Statement
    outer: tuple[Loop, ...]  # loops that stay loops, outermost first
    inner: tuple[Loop, ...]  # unrolled ones, virtual threads last
    conditions: tuple[tuple[Node, bool], ...]  # (condition, value it must have)

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.outer + self.inner


class _Analysis:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.block_count = math.prod(kernel.blocks.values())
        self.thread_count = math.prod(kernel.threads.values())
        self.warps = math.ceil(self.thread_count / WARP_SIZE)
        self.touched_buffers, self.touched = virtual_threads(kernel)
        self.unrolled = unrolled_loops(kernel, self.touched)
        self.stored = stored_indices(kernel.body)
        self.base = self._sample_base()
        self.leaves = list(self._leaves(kernel.body, (), ()))
        self.spilled = self._spilled_buffers()
        self.counts: dict[str, float] = {}
        self.shared: dict[str, float] = {}
        self.globals: list[GlobalAccess] = []
        self.lane_weight = [0.0, 0.0]  # active threads, issued threads
        self.ilp_weight = [0.0, 0.0]
        self.waits: dict[tuple[int, ...], float] = {}
        self.local_requests = 0.0

    # ---- samples -------------------------------------------------------------------------------

    def _sample_base(self) -> dict[Hashable, NDArray[np.int64]]:
        """Block and thread indices of `SAMPLES` warps, shapes (SAMPLES, 1) and (SAMPLES, 32)."""
        base: dict[Hashable, NDArray[np.int64]] = {LANE: np.arange(WARP_SIZE)[None, :]}
        block = _spread(0, self.block_count)[:, None]
        for key, count in self.kernel.blocks.items():
            base[key] = block % count
            block = block // count
        warp = _spread(1, self.warps)[:, None]
        thread = warp * WARP_SIZE + base[LANE]
        self.inside = thread < self.thread_count
        for key, count in self.kernel.threads.items():
            base[key] = thread % count
            thread = thread // count
        return base

    def _environment(self, leaf: _Leaf) -> dict[Hashable, Any]:
        values: dict[Hashable, Any] = dict(self.base)
        for depth, loop in enumerate(leaf.loops):
            extent = np.maximum(1, addresses.evaluate(loop.extent, values))
            values[loop.key] = (_spread_unit(2 + depth)[:, None] * extent).astype(np.int64)
        return values

    def _active(
        self, values: Mapping[Hashable, Any], conditions: Sequence[tuple[Node, bool]]
    ) -> NDArray[np.bool_]:
        active = self.inside
        for condition, wanted in conditions:
            truth = np.asarray(addresses.evaluate(condition, values)).astype(bool)
            active = active & (truth == wanted)
        return active

    # ---- the tree ------------------------------------------------------------------------------

    def _leaves(
        self,
        trees: Sequence[Tree],
        path: tuple[Loop, ...],
        conditions: tuple[tuple[Node, bool], ...],
    ) -> Iterator[_Leaf]:
        for tree in trees:
            if isinstance(tree, Loop):
                yield from self._leaves(tree.body, (*path, tree), conditions)
            elif isinstance(tree, Branch):
                yield from self._leaves(tree.body, path, (*conditions, (tree.condition, True)))
                yield from self._leaves(
                    tree.otherwise, path, (*conditions, (tree.condition, False))
                )
            else:
                yield self._leaf(tree, path, conditions)

    def _leaf(
        self,
        statement: Statement,
        path: tuple[Loop, ...],
        conditions: tuple[tuple[Node, bool], ...],
    ) -> _Leaf:
        split = len(path)
        while split and id(path[split - 1]) in self.unrolled:
            split -= 1
        virtual: list[Loop] = []
        if id(statement) in self.touched:
            virtual = [
                Loop(key, addresses.const(extent), "vthread", [])
                for key, extent in self.kernel.vthreads.items()
            ]
        return _Leaf(statement, path[:split], (*path[split:], *virtual), conditions)

    def _spilled_buffers(self) -> frozenset[str]:
        """Local arrays that are indexed by loops that stay loops: they cannot be registers."""
        found = set()
        for leaf in self.leaves:
            varying = {loop.key for loop in leaf.outer}
            for access in leaf.statement.accesses:
                if access.scope == "local" and access.keys & varying:
                    found.add(access.buffer)
        return frozenset(found)

    # ---- counting ------------------------------------------------------------------------------

    def launch(self) -> KernelLaunch:
        for leaf in self.leaves:
            self._count_leaf(leaf)
        self._count_loops(self.kernel.body, 1.0)
        registers = self._registers()
        kernel = self.kernel
        return KernelLaunch(
            name=kernel.name,
            blocks=self.block_count,
            threads_per_block=self.thread_count,
            shared_bytes_per_block=kernel.shared_bytes,
            registers_per_thread=registers,
            instructions=Instructions(**self.counts),
            global_accesses=tuple(self.globals),
            shared=SharedTraffic(**self.shared),
            lane_share=_mean(self.lane_weight, 1.0),
            ilp=_mean(self.ilp_weight, 1.0),
            dependent_loads=sum(self.waits.values()),
            barriers_per_block=self.counts.get("barrier", 0.0) / self.block_count / self.warps,
            pipeline_stages=2 if kernel.pipelined else 1,
        )

    def _count_leaf(self, leaf: _Leaf) -> None:
        values = self._environment(leaf)
        active = self._active(values, leaf.conditions)
        awake = active.any(axis=1)
        if not awake.any():
            return
        warps = self.block_count * self.warps * float(awake.mean())
        lanes = float(active.sum() / awake.sum() / WARP_SIZE)
        trips = [_mean_extent(loop, values) for loop in leaf.loops]
        executions = warps * math.prod(trips)
        arithmetic = 0.0
        for name, count in leaf.statement.operations.items():
            self._add(name, count * executions)
            arithmetic += count * executions
        self.lane_weight[0] += lanes * arithmetic
        self.lane_weight[1] += arithmetic
        self._count_conditions(leaf, warps, trips)
        ilp = self._independent_results(leaf)
        self.ilp_weight[0] += ilp * arithmetic
        self.ilp_weight[1] += arithmetic
        for access in leaf.statement.accesses:
            self._count_access(leaf, access, values, active, trips)

    def _count_conditions(self, leaf: _Leaf, warps: float, trips: Sequence[float]) -> None:
        """A condition is tested where the innermost loop that it depends on runs."""
        for condition, _ in leaf.conditions:
            keys = addresses.variables(condition)
            depth = max((i + 1 for i, loop in enumerate(leaf.loops) if loop.key in keys), default=0)
            if depth:
                self._add("control", 2 * warps * math.prod(trips[:depth]))

    def _independent_results(self, leaf: _Leaf) -> float:
        """Different places that the unrolled copies of a statement write to."""
        stores = [access for access in leaf.statement.accesses if access.store]
        if not stores:
            return 1.0
        return min(MAX_ILP, float(len(self._unrolled_offsets(leaf, stores[0], {}))))

    def _unrolled_offsets(
        self, leaf: _Leaf, access: Access, values: Mapping[Hashable, Any]
    ) -> NDArray[np.int64]:
        """Different indices of the unrolled copies of one access, one sampled thread's."""
        extents = {
            loop.key: int(addresses.evaluate(loop.extent, {}))
            for loop in leaf.inner
            if self._has_offset(access, loop)
        }
        while math.prod(extents.values()) > _GRID_LIMIT:
            longest = max(extents, key=lambda key: extents[key])
            extents[longest] = extents[longest] // 2
        axes = np.meshgrid(*(np.arange(extent) for extent in extents.values()), indexing="ij")
        point: dict[Hashable, Any] = {key: _first(value) for key, value in values.items()}
        for key, axis in zip(extents, axes, strict=True):
            point[key] = axis
        index = np.asarray(addresses.evaluate(access.index, point), dtype=np.int64)
        if access.scope == "local" and access.buffer in self.touched_buffers:
            # Each virtual thread has its own copy of the array.
            for loop in leaf.inner:
                if loop.kind == "vthread" and loop.key not in access.keys:
                    index = index + access.elements * np.asarray(point.get(loop.key, 0))
        return addresses.distinct(index)

    def _has_offset(self, access: Access, loop: Loop) -> bool:
        if loop.key in access.keys:
            return True
        private = access.scope == "local" and access.buffer in self.touched_buffers
        return private and loop.kind == "vthread"

    def _count_access(
        self,
        leaf: _Leaf,
        access: Access,
        values: Mapping[Hashable, Any],
        active: NDArray[np.bool_],
        trips: Sequence[float],
    ) -> None:
        if access.scope == "local" and access.buffer not in self.spilled:
            self.local_requests += self.block_count * self.warps * math.prod(trips)
            return
        mask = active & self._active(values, [(item, True) for item in access.conditions])
        awake = mask.any(axis=1)
        if not awake.any():
            return
        repeats = self._repeats(leaf, access, trips)
        warps = self.block_count * self.warps * float(awake.mean()) * repeats
        lanes = float(mask.sum() / awake.sum() / WARP_SIZE)
        first = {**values, **{loop.key: 0 for loop in leaf.inner}}
        index = np.broadcast_to(
            np.asarray(addresses.evaluate(access.index, first), dtype=np.int64), mask.shape
        )[awake]
        mask = mask[awake]
        divisions = _divisions(access.index, {loop.key for loop in leaf.loops})
        widths = self._widths(leaf, access, values, index)
        for width, copies in widths.items():
            requests = warps * copies
            self._add("integer", (1 + 3 * divisions) * warps * (copies if divisions else 1))
            moved = requests * lanes * WARP_SIZE * width * access.element_bytes
            if access.scope == "shared":
                self._count_shared(access, index, mask, width, requests, moved)
            elif access.scope == "local":
                self._count_spilled(access, width, requests, moved)
            else:
                self._count_global(leaf, access, index, mask, width, requests, moved)
        if access.scope != "shared" and not access.store:
            self._count_wait(leaf, sum(widths.values()), repeats)

    def _repeats(self, leaf: _Leaf, access: Access, trips: Sequence[float]) -> float:
        """How often the surrounding loops repeat the access; invariant loops are left out."""
        outer = list(zip(leaf.outer, trips, strict=False))
        fixed = not any(self._has_offset(access, loop) for loop in leaf.inner)
        while fixed and outer and self._invariant(access, outer[-1][0]):
            outer.pop()
        return math.prod(trip for _, trip in outer)

    def _invariant(self, access: Access, loop: Loop) -> bool:
        if loop.key in access.keys:
            return False
        return self.stored[id(loop)].get(access.buffer, set()) <= {access.index}

    def _widths(
        self,
        leaf: _Leaf,
        access: Access,
        values: Mapping[Hashable, Any],
        index: NDArray[np.int64],
    ) -> dict[int, int]:
        """{elements in one instruction: instructions} for the unrolled copies of one access."""
        offsets = self._unrolled_offsets(leaf, access, values)
        widest = MAX_VECTOR_BYTES // access.element_bytes
        if access.width > 1 or widest < 2:
            width = min(access.width, max(1, widest))
            return {width: len(offsets) * -(-access.width // width)}
        vector = _vector_extent(leaf)
        if access.scope != "shared" and vector == 1:
            return {1: len(offsets)}
        # Only what is aligned for every thread becomes wide.
        relative = index - index[:1, :1]
        base = int(offsets[0])
        common = math.gcd(int(np.gcd.reduce(relative, axis=None)), base)
        limit = min(widest, vector) if access.scope != "shared" else widest
        aligned = math.gcd(common, limit) if common else limit
        return addresses.vector_runs(
            (offsets - base).tolist(), access.element_bytes, aligned * access.element_bytes
        )

    def _count_shared(
        self,
        access: Access,
        index: NDArray[np.int64],
        mask: NDArray[np.bool_],
        width: int,
        requests: float,
        moved: float,
    ) -> None:
        width_bytes = width * access.element_bytes
        start = index // width * width if width > access.width else index
        passes = addresses.wavefronts_per_request(start * access.element_bytes, mask, width_bytes)
        kind = "store" if access.store else "load"
        for name, value in (
            (f"{kind}_requests", requests),
            (f"{kind}_wavefronts", requests * float(passes.mean())),
            (f"{kind}_bytes", moved),
        ):
            self.shared[name] = self.shared.get(name, 0.0) + value

    def _count_spilled(self, access: Access, width: int, requests: float, moved: float) -> None:
        """A local array in thread-local memory: interleaved by thread, so always coalesced."""
        per_block = float(access.elements * access.element_bytes * self.thread_count)
        total = requests * WARP_SIZE * width * access.element_bytes
        self.globals.append(
            GlobalAccess(
                buffer=f"local:{access.buffer}",
                store=access.store,
                requests=requests,
                bytes_requested=moved,
                sectors=total / SECTOR_BYTES,
                lines=total / 128,
                block_reuse=((0.0, total / self.block_count), (per_block, 0.1 * per_block)),
                launch_reuse=(
                    (1.0, per_block),
                    (float(self.block_count), per_block * self._resident()),
                ),
            )
        )

    def _count_global(
        self,
        leaf: _Leaf,
        access: Access,
        index: NDArray[np.int64],
        mask: NDArray[np.bool_],
        width: int,
        requests: float,
        moved: float,
    ) -> None:
        width_bytes = width * access.element_bytes
        start = index // width * width if width > access.width else index
        byte = start * access.element_bytes
        sectors = addresses.units_per_request(byte, mask, width_bytes, SECTOR_BYTES)
        lines = addresses.units_per_request(byte, mask, width_bytes, 128)
        total_sectors = requests * float(sectors.mean())
        block_curve, launch_curve = self._reuse(leaf, access, total_sectors * SECTOR_BYTES)
        self.globals.append(
            GlobalAccess(
                buffer=access.buffer,
                store=access.store,
                requests=requests,
                bytes_requested=moved,
                sectors=total_sectors,
                lines=requests * float(lines.mean()),
                block_reuse=() if access.store else block_curve,
                launch_reuse=launch_curve,
            )
        )

    def _count_wait(self, leaf: _Leaf, copies: float, repeats: float) -> None:
        """One thread waits once for all the loads that the same loops surround.

        Args:
            leaf: where the load stands.
            copies: instructions that unrolling puts side by side.
            repeats: how often the loops around them repeat.
        """
        if leaf.outer and repeats > 1 and not has_barrier(leaf.outer[-1]):
            copies *= PARTIAL_UNROLL
            repeats = max(1.0, repeats / PARTIAL_UNROLL)
        waits = repeats * max(1.0, copies / MAX_LOADS_IN_FLIGHT)
        place = tuple(id(loop) for loop in leaf.outer)
        self.waits[place] = max(self.waits.get(place, 0.0), waits)

    # ---- reuse ---------------------------------------------------------------------------------

    def _reuse(self, leaf: _Leaf, access: Access, requested: float) -> tuple[Curve, Curve]:
        """Reuse within a block and among blocks (see `GlobalAccess`)."""
        footprint = addresses.Footprint(addresses.components(access.index))
        size = float(access.elements * access.element_bytes)
        share = self._address_share(leaf, access)

        def unique(extents: Mapping[Hashable, int]) -> float:
            found = footprint.touched(extents)
            return min(size, share * found.bytes_in_units(access.element_bytes, SECTOR_BYTES))

        extents: dict[Hashable, int] = {**self.kernel.threads, LANE: WARP_SIZE}
        for loop in leaf.inner:
            extents[loop.key] = extent(loop)
        levels = [unique(extents)]
        trips = [extent(loop) for loop in leaf.outer]
        points = [(0.0, requested / self.block_count)]
        points.append((min(levels[0], 2048.0), levels[0] * math.prod(trips)))
        for depth in range(len(trips) - 1, -1, -1):
            loop = leaf.outer[depth]
            extents[loop.key] = trips[depth]
            if trips[depth] > 1:
                if loop.key in access.keys:
                    levels.append(unique(extents))
                points.append((levels[-1], levels[-1] * math.prod(trips[:depth])))
        block_curve = _falling(points)
        return block_curve, self._reuse_among_blocks(unique, extents, footprint, levels[-1], size)

    def _address_share(self, leaf: _Leaf, access: Access) -> float:
        """Part of the threads' addresses that conditions leave (whole warps and single threads)."""
        if not leaf.conditions and not access.conditions and self.inside.all():
            return 1.0
        values = self._environment(leaf)
        mask = self._active(
            values, [*leaf.conditions, *((item, True) for item in access.conditions)]
        )
        return max(1.0 / SAMPLES, float(mask.mean()))

    def _reuse_among_blocks(
        self,
        unique: Any,
        extents: dict[Hashable, int],
        footprint: addresses.Footprint,
        one_block: float,
        size: float,
    ) -> Curve:
        points = [(1.0, one_block)]
        if self.block_count > 1 and not footprint.keys & set(self.kernel.blocks):
            points.append((float(self.block_count), one_block))
            return tuple(points)
        for count in _block_counts(self.block_count):
            extents = {**extents, **self._block_extents(count)}
            bytes_ = max(points[-1][1], unique(extents))
            points.append((float(count), min(size, bytes_)))
        return tuple(points)

    def _block_extents(self, count: int) -> dict[Hashable, int]:
        """Extents of the block indices that about ``count`` consecutive blocks span."""
        extents = {}
        for key, most in self.kernel.blocks.items():
            extents[key] = min(most, max(1, count))
            count = -(-count // most)
        return extents

    # ---- the rest ------------------------------------------------------------------------------

    def _count_loops(self, trees: Sequence[Tree], times: float) -> None:
        """Counters and branches of the loops that stay loops."""
        for tree in trees:
            if isinstance(tree, Branch):
                self._count_loops([*tree.body, *tree.otherwise], times)
            if not isinstance(tree, Loop) or id(tree) in self.unrolled:
                continue
            inside = times * extent(tree)
            innermost = not any(stays_loop(item, self.unrolled) for item in tree.body)
            factor = PARTIAL_UNROLL if innermost and not has_barrier(tree) else 1
            issued = self.block_count * self.warps * inside / factor
            self._add("control", 2 * issued)
            self._add("integer", issued)
            self._count_loops(tree.body, inside)

    def _registers(self) -> int:
        """Estimate of registers a thread; what does not fit is spilled."""
        words = 0.0
        for name, size in self.kernel.local_bytes.items():
            if name in self.spilled:
                continue
            copies = math.prod(self.kernel.vthreads.values()) if name in self.touched_buffers else 1
            words += size * copies / 4
        operands = self._operand_registers()
        wanted = BASE_REGISTERS + words + operands
        # TVM writes __launch_bounds__, so the compiler keeps one block of these threads runnable.
        limit = min(MAX_REGISTERS, 65536 // max(1, self.warps * WARP_SIZE) // 8 * 8)
        if wanted > limit and words:
            self._spill(min(1.0, (wanted - limit) / (words + operands)), wanted - limit)
        return int(min(limit, wanted))

    def _operand_registers(self) -> float:
        """Registers for what the largest unrolled statement has loaded at one time."""
        most = 0.0
        for leaf in self.leaves:
            loads = [a for a in leaf.statement.accesses if not a.store and a.scope != "local"]
            count = sum(
                len(self._unrolled_offsets(leaf, access, {})) * access.element_bytes / 4
                for access in loads
            )
            most = max(most, count)
        return min(32.0, most)

    def _spill(self, share: float, words: float) -> None:
        """Loads and stores of registers that did not fit."""
        per_block = words * 4 * self.thread_count
        # The compiler spills what is used least: a fourth of the average use (estimate).
        requests = 0.25 * share * self.local_requests
        total = requests * WARP_SIZE * 4
        for store in (False, True):
            self.globals.append(
                GlobalAccess(
                    buffer="local:spill",
                    store=store,
                    requests=requests / 2,
                    bytes_requested=total / 2,
                    sectors=total / 2 / SECTOR_BYTES,
                    lines=total / 2 / 128,
                    block_reuse=(
                        (0.0, total / 2 / self.block_count),
                        (per_block, min(per_block, total / 2 / self.block_count)),
                    ),
                    launch_reuse=(
                        (1.0, per_block),
                        (float(self.block_count), per_block * self._resident()),
                    ),
                )
            )

    def _resident(self) -> int:
        """Thread-local memory is reused by later blocks: only resident ones occupy it."""
        return min(self.block_count, RESIDENT_BLOCKS)

    def _add(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value


def _mean_extent(loop: Loop, values: Mapping[Hashable, Any]) -> float:
    return float(np.mean(np.maximum(0, addresses.evaluate(loop.extent, values))))


def _vector_extent(leaf: _Leaf) -> int:
    return math.prod(extent(loop) for loop in leaf.inner if loop.kind == "vector")


def _divisions(node: Node, varying: set[Hashable]) -> int:
    """Divisions that must be done again in a loop; powers of two are shifts and cost less than one."""
    if node[0] in ("const", "var"):
        return 0
    inside = sum(_divisions(operand, varying) for operand in node[1:])
    divides = node[0] in ("//", "%", "truncdiv", "truncmod")
    if divides and addresses.variables(node) & varying:
        divisor = node[2][1] if node[2][0] == "const" else 3
        return inside + (0 if divisor & (divisor - 1) == 0 else 1)
    return inside


@lru_cache(maxsize=64)
def _spread_unit(dimension: int) -> NDArray[np.float64]:
    """`SAMPLES` numbers in [0, 1), evenly spread; another order for each dimension."""
    order = np.random.default_rng(dimension).permutation(SAMPLES)
    return (order + 0.5) / SAMPLES


def _spread(dimension: int, count: int) -> NDArray[np.int64]:
    return (_spread_unit(dimension) * count).astype(np.int64)


def _first(value: Any) -> int:
    return int(np.asarray(value).reshape(-1)[0])


def _mean(weight: Sequence[float], default: float) -> float:
    return weight[0] / weight[1] if weight[1] > 0 else default


def _block_counts(blocks: int) -> list[int]:
    """Powers of eight below the number of blocks, and that number."""
    powers = itertools.takewhile(lambda n: n < blocks, (8**i for i in itertools.count(1)))
    return [*powers, blocks] if blocks > 1 else []


def _falling(points: Sequence[tuple[float, float]]) -> Curve:
    """Points sorted by cache size, with the least traffic of all smaller sizes."""
    curve: list[tuple[float, float]] = []
    least = math.inf
    for size, traffic in sorted(points):
        least = min(least, traffic)
        if curve and curve[-1][0] == size:
            curve[-1] = (size, least)
        else:
            curve.append((size, least))
    return tuple(curve)
