"""A kernel as a tree of loops, branches and statements, as a compiler sees it before it unrolls.

Plain data and what can be read off the tree alone; `tvm_energy.simulation.loop_analysis` counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tvm_energy.simulation import addresses
from tvm_energy.simulation.addresses import Node

COMPILER_UNROLL_STEPS = 128  # estimate: nvcc unrolls loops of constant, small trip count by itself
LANE: Hashable = "lane"  #: variable of the thread's number within its warp


@dataclass(frozen=True)
class Access:
    """One load or store of a statement.

    Attributes:
        buffer: its name; accesses of one buffer share it.
        scope: ``global``, ``shared`` or ``local``.
        element_bytes: size of an element.
        elements: size of the buffer, in elements.
        index: flat index in elements.
        store: True for a store.
        conditions: the access happens only where all are true.
        width: elements that one thread moves in one instruction, before any merging.
    """

    buffer: str
    scope: str
    element_bytes: int
    elements: int
    index: Node
    store: bool
    conditions: tuple[Node, ...] = ()
    width: int = 1

    @cached_property
    def keys(self) -> frozenset[Hashable]:
        """Variables of the index."""
        return addresses.variables(self.index)


@dataclass
class Statement:
    """Arithmetic and accesses that happen together.

    Attributes:
        accesses: loads and stores.
        operations: name in `Instructions` -> count for one thread, one execution.
        keys: variables that the statement mentions.
    """

    accesses: list[Access] = field(default_factory=list)
    operations: dict[str, float] = field(default_factory=dict)
    keys: frozenset[Hashable] = frozenset()


@dataclass
class Loop:
    """A loop from 0 to ``extent``; ``kind`` is ``serial``, ``unrolled``, ``vector`` or ``vthread``."""

    key: Hashable
    extent: Node
    kind: str
    body: list[Tree]


@dataclass
class Branch:
    """``body`` where ``condition`` holds, ``otherwise`` where not."""

    condition: Node
    body: list[Tree]
    otherwise: list[Tree] = field(default_factory=list)


Tree = Statement | Loop | Branch


@dataclass(kw_only=True)
class Kernel:
    """One kernel as loops.

    Attributes:
        name: for people.
        blocks: extent of each block index that is used, x first.
        threads: extent of each thread index that is used, x first.
        vthreads: extents of virtual threads.
        local_bytes: thread-local arrays: name -> bytes.
        shared_bytes: shared memory of a block.
        unroll_steps: limit of the unroll pragma.
        pipelined: the kernel loads ahead (software pipeline).
        body: what each thread does.
    """

    name: str
    blocks: dict[Hashable, int] = field(default_factory=dict)
    threads: dict[Hashable, int] = field(default_factory=dict)
    vthreads: dict[Hashable, int] = field(default_factory=dict)
    local_bytes: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    unroll_steps: int = 0
    pipelined: bool = False
    body: list[Tree] = field(default_factory=list)


def statements(trees: Sequence[Tree]) -> Iterator[Statement]:
    """All statements, in order."""
    for tree in trees:
        if isinstance(tree, Loop):
            yield from statements(tree.body)
        elif isinstance(tree, Branch):
            yield from statements(tree.body)
            yield from statements(tree.otherwise)
        else:
            yield tree


def virtual_threads(kernel: Kernel) -> tuple[frozenset[str], frozenset[int]]:
    """Local buffers and statements that exist once for each virtual thread.

    As TVM's InjectVirtualThread: a statement that mentions a virtual thread, or a local buffer that
    such a statement wrote.
    """
    virtual = set(kernel.vthreads)
    buffers: set[str] = set()
    if not virtual:
        return frozenset(), frozenset()
    everything = list(statements(kernel.body))
    while True:
        touched = {
            id(statement): statement
            for statement in everything
            if statement.keys & virtual or any(a.buffer in buffers for a in statement.accesses)
        }
        written = {
            access.buffer
            for statement in touched.values()
            for access in statement.accesses
            if access.store and access.scope == "local"
        }
        if written <= buffers:
            return frozenset(buffers), frozenset(touched)
        buffers |= written


def unrolled_loops(kernel: Kernel, touched: frozenset[int]) -> frozenset[int]:
    """Identities of the loops that are unrolled completely."""
    budget = max(kernel.unroll_steps, COMPILER_UNROLL_STEPS)
    copies = math.prod(kernel.vthreads.values())
    found: set[int] = set()

    def steps(tree: Tree) -> float:
        if isinstance(tree, Statement):
            return float(copies) if id(tree) in touched else 1.0
        if isinstance(tree, Branch):
            return sum(map(steps, [*tree.body, *tree.otherwise]))
        inside = sum(map(steps, tree.body))
        count = extent(tree)
        constant = not addresses.variables(tree.extent)
        total = count * max(1.0, inside)
        whole = all(_is_unrolled(item, found) for item in tree.body)
        wanted = tree.kind in ("vector", "unrolled") or total <= budget
        if constant and whole and wanted and not has_barrier(tree):
            found.add(id(tree))
            return total
        return math.inf if not math.isfinite(inside) else max(total, budget + 1.0)

    for item in kernel.body:
        steps(item)
    return frozenset(found)


def _is_unrolled(tree: Tree, unrolled: set[int]) -> bool:
    if isinstance(tree, Loop):
        return id(tree) in unrolled
    if isinstance(tree, Branch):
        return all(_is_unrolled(item, unrolled) for item in [*tree.body, *tree.otherwise])
    return True


def stays_loop(tree: Tree, unrolled: frozenset[int]) -> bool:
    """True when the tree is, or its branches hold, a loop that is not unrolled."""
    if isinstance(tree, Loop):
        return id(tree) not in unrolled
    if isinstance(tree, Branch):
        return any(stays_loop(item, unrolled) for item in [*tree.body, *tree.otherwise])
    return False


def has_barrier(tree: Tree) -> bool:
    """True when a statement in the tree waits for the whole block."""
    return any("barrier" in statement.operations for statement in statements([tree]))


def stored_indices(trees: Sequence[Tree]) -> dict[int, dict[str, set[Node]]]:
    """For each loop (by identity): buffer -> indices at which the loop stores to it."""
    found: dict[int, dict[str, set[Node]]] = {}

    def visit(items: Sequence[Tree]) -> dict[str, set[Node]]:
        stored: dict[str, set[Node]] = {}
        for item in items:
            if isinstance(item, Statement):
                inside = {a.buffer: {a.index} for a in item.accesses if a.store}
            elif isinstance(item, Branch):
                inside = visit([*item.body, *item.otherwise])
            else:
                inside = found[id(item)] = visit(item.body)
            for buffer, indices in inside.items():
                stored.setdefault(buffer, set()).update(indices)
        return stored

    visit(trees)
    return found


def extent(loop: Loop) -> int:
    """Extent of a loop; one that depends on other loops counts as at their first iteration."""
    return max(1, int(addresses.evaluate(loop.extent, {})))
