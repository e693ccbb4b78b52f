"""Addresses as numbers: which sectors, banks and bytes an index expression touches.

Index expressions are small trees of tuples, ``(operator, operand, ...)``, with ``("const", value)`` and
``("var", key)`` as leaves. They are evaluated on numpy arrays, so no operator needs symbolic rules of
its own: what threads of a warp do together is seen by evaluating the index for these threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Node = tuple[Any, ...]
Integers = NDArray[np.int64]
Values = Mapping[Hashable, Any]  #: variable -> number or array

#: Most intervals in a set of addresses that is written out; larger ones are extrapolated.
SET_LIMIT = 2048

#: Most points at which one component of an index is evaluated.
GRID_LIMIT = 8192

BANKS = 32
BANK_BYTES = 4


def const(value: int) -> Node:
    """A number."""
    return ("const", value)


def var(key: Hashable) -> Node:
    """A variable."""
    return ("var", key)


def _floordiv(a: Any, b: Any) -> Any:
    return np.floor_divide(a, np.where(np.equal(b, 0), 1, b))


def _floormod(a: Any, b: Any) -> Any:
    return np.mod(a, np.where(np.equal(b, 0), 1, b))


def _truncdiv(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * _floordiv(np.abs(a), np.abs(b))


def _truncmod(a: Any, b: Any) -> Any:
    return np.asarray(a) - np.asarray(b) * _truncdiv(a, b)


def _scatter(a: Any) -> Any:
    """Stands for a value that is not known here: spread over a large range, without order."""
    return (np.asarray(a, dtype=np.int64) * 0x9E3779B1 + 0x7F4A7C15) % (1 << 24)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "//": _floordiv,
    "%": _floormod,
    "truncdiv": _truncdiv,
    "truncmod": _truncmod,
    "min": np.minimum,
    "max": np.maximum,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "select": np.where,
    "<<": np.left_shift,
    ">>": np.right_shift,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "scatter": _scatter,
}
OPERATORS = frozenset(_OPERATORS)


def evaluate(node: Node, values: Values) -> Any:
    """Value of an expression; variables that are not given are 0. Arrays broadcast."""
    kind = node[0]
    if kind == "const":
        return node[1]
    if kind == "var":
        return values.get(node[1], 0)
    return _OPERATORS[kind](*[evaluate(operand, values) for operand in node[1:]])


def variables(node: Node) -> frozenset[Hashable]:
    """Variables that an expression depends on."""
    if node[0] == "const":
        return frozenset()
    if node[0] == "var":
        return frozenset((node[1],))
    return frozenset().union(*(variables(operand) for operand in node[1:]))


def terms(node: Node, factor: int = 1) -> list[tuple[int, Node]]:
    """Split ``a + 3 * (b - c)`` into [(1, a), (3, b), (-3, c)]."""
    kind = node[0]
    if kind == "+":
        return terms(node[1], factor) + terms(node[2], factor)
    if kind == "-":
        return terms(node[1], factor) + terms(node[2], -factor)
    if kind == "*" and node[2][0] == "const":
        return terms(node[1], factor * node[2][1])
    if kind == "*" and node[1][0] == "const":
        return terms(node[2], factor * node[1][1])
    return [(factor, node)]


@dataclass(frozen=True)
class Component:
    """A part of a sum that shares no variable with the other parts."""

    keys: frozenset[Hashable]
    parts: tuple[tuple[int, Node], ...]

    def value(self, values: Values) -> Any:
        """The part's value."""
        total: Any = 0
        for factor, node in self.parts:
            total = total + factor * np.asarray(evaluate(node, values), dtype=np.int64)
        return total


def components(node: Node) -> list[Component]:
    """Split a sum into parts that have no variable in common; constants are left out."""
    groups: list[tuple[set[Hashable], list[tuple[int, Node]]]] = []
    for factor, term in terms(node):
        keys = set(variables(term))
        if not keys:
            continue
        parts = [(factor, term)]
        apart = []
        for other_keys, other_parts in groups:
            if keys & other_keys:
                keys |= other_keys
                parts += other_parts
            else:
                apart.append((other_keys, other_parts))
        groups = [*apart, (keys, parts)]
    return [Component(frozenset(keys), tuple(parts)) for keys, parts in groups]


# ---- sets of addresses ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AddressSet:
    """Different addresses in elements, as disjoint intervals; beyond `SET_LIMIT` of them, counted.

    Attributes:
        starts, ends: the intervals, sorted, ``starts <= address < ends``.
        scale: how many times larger the true set is than these.
        strides: (stride, count) of what was added by extrapolation.
    """

    starts: Integers
    ends: Integers
    scale: float = 1.0
    strides: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, values: Integers) -> AddressSet:
        """The set of these values."""
        ordered = np.sort(values, axis=None)
        breaks = np.flatnonzero(np.diff(ordered) > 1)
        starts = ordered[np.concatenate(([0], breaks + 1))]
        ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))] + 1
        return cls(starts, ends)

    @property
    def size(self) -> float:
        """Number of different addresses."""
        return float((self.ends - self.starts).sum()) * self.scale

    @property
    def span(self) -> int:
        """Distance from the first to the last address."""
        return int(self.ends[-1] - self.starts[0] - 1)

    def bytes_in_units(self, element_bytes: int, unit_bytes: int) -> float:
        """Bytes of all units (sectors, lines) that the addresses touch."""
        first = self.starts * element_bytes // unit_bytes
        behind = (self.ends * element_bytes + unit_bytes - 1) // unit_bytes
        first, behind = _merge(first, behind)
        return float((behind - first).sum()) * unit_bytes * self.scale

    def plus(self, other: AddressSet) -> AddressSet:
        """All sums of an address of each set."""
        if len(self.starts) * len(other.starts) <= SET_LIMIT and not self.strides:
            # Intervals of whole numbers add up to intervals without gaps.
            starts = np.add.outer(self.starts, other.starts).ravel()
            ends = np.add.outer(self.ends, other.ends - 1).ravel()
            return AddressSet(*_merge(starts, ends), self.scale * other.scale)
        widened = AddressSet(*_merge(self.starts, self.ends + other.ends[0] - other.starts[0] - 1))
        count = len(other.starts)
        step = int(other.starts[1] - other.starts[0]) if count > 1 else 0
        factor = 1 + self._fresh_share(widened, step) * (count - 1)
        return AddressSet(
            widened.starts,
            widened.ends,
            self.scale * other.scale * factor,
            (*self.strides, (abs(step), count)),
        )

    def _fresh_share(self, widened: AddressSet, step: int) -> float:
        """Share of the addresses that are new after a shift by ``step``."""
        for stride, count in reversed(self.strides):
            if stride and step % stride == 0:
                return min(1.0, step // stride / count)
        starts = np.concatenate((widened.starts, widened.starts + step))
        ends = np.concatenate((widened.ends, widened.ends + step))
        starts, ends = _merge(starts, ends)
        both = float((ends - starts).sum())
        one = float((widened.ends - widened.starts).sum())
        return (both - one) / one


def distinct(values: Integers) -> Integers:
    """Different values, ascending; for arrays this small faster than numpy's ``unique``."""
    ordered = np.sort(values, axis=None)
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return ordered[fresh]


def _merge(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """The union of intervals as disjoint, sorted intervals."""
    if len(starts) == 1:
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    fresh = np.flatnonzero(starts[1:] > reach[:-1])
    return (
        starts[np.concatenate(([0], fresh + 1))],
        reach[np.concatenate((fresh, [len(starts) - 1]))],
    )


class Footprint:
    """The addresses that a sum of components takes while its variables run.

    Args:
        parts: the components of an index.
    """

    def __init__(self, parts: Sequence[Component]) -> None:
        self.parts = parts
        self.keys: frozenset[Hashable] = frozenset().union(*(part.keys for part in parts))
        self._known: dict[tuple[Any, ...], AddressSet] = {}

    def touched(self, extents: Mapping[Hashable, int]) -> AddressSet:
        """The addresses while each variable runs over its extent, the others being 0."""
        sets = [self._part(index, extents) for index in range(len(self.parts))]
        total = AddressSet.of(np.zeros(1, dtype=np.int64))
        for item in sorted(sets, key=lambda item: item.span):
            total = total.plus(item)
        return total

    def _part(self, index: int, extents: Mapping[Hashable, int]) -> AddressSet:
        part = self.parts[index]
        sizes = {key: extents[key] for key in part.keys if extents.get(key, 1) > 1}
        name = (index, frozenset(sizes.items()))
        if name not in self._known:
            self._known[name] = _component_set(part, sizes)
        return self._known[name]


def _component_set(part: Component, sizes: dict[Hashable, int]) -> AddressSet:
    """The values of one component; one with too many points is evaluated on part of them."""
    factor = 1.0
    while math.prod(sizes.values()) > GRID_LIMIT:
        longest = max(sizes, key=lambda key: sizes[key])
        shorter = max(1, GRID_LIMIT * sizes[longest] // math.prod(sizes.values()))
        shorter = min(shorter, sizes[longest] - 1)
        factor *= sizes[longest] / shorter
        sizes[longest] = shorter
    axes = np.meshgrid(*(np.arange(size) for size in sizes.values()), indexing="ij", sparse=True)
    values = np.asarray(part.value(dict(zip(sizes, axes, strict=True))), dtype=np.int64)
    found = AddressSet.of(values)
    if factor == 1.0:
        return found
    # Where part of the range repeats itself, so will the rest.
    fresh = found.size / math.prod(sizes.values())
    return AddressSet(found.starts, found.ends, max(1.0, factor * fresh))


# ---- what one warp does ---------------------------------------------------------------------------


def units_per_request(
    addresses: Integers, active: NDArray[np.bool_], width: int, unit_bytes: int
) -> NDArray[np.int64]:
    """Different units of memory that each request touches.

    Args:
        addresses: byte addresses, shape (requests, 32).
        active: threads that take part, same shape.
        width: bytes of each thread.
        unit_bytes: 32 for sectors, 128 for lines.

    Returns:
        Shape (requests,).
    """
    first = addresses // unit_bytes
    last = (addresses + width - 1) // unit_bytes
    units = np.concatenate([first, last], axis=1)
    return _distinct_per_row(units, np.concatenate([active, active], axis=1))


def _distinct_per_row(values: Integers, active: NDArray[np.bool_]) -> NDArray[np.int64]:
    hidden = np.iinfo(np.int64).max
    ordered = np.sort(np.where(active, values, hidden), axis=1)
    fresh = np.ones(ordered.shape, dtype=bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    counted: NDArray[np.int64] = (fresh & (ordered != hidden)).sum(axis=1)
    return counted


def wavefronts_per_request(
    addresses: Integers, active: NDArray[np.bool_], width: int
) -> NDArray[np.int64]:
    """Passes through shared memory of each request: bank conflicts and wide accesses.

    As many as the busiest bank has different 4-byte words to deliver. Threads that read the same word
    share it; 16 bytes from each of 32 threads take four passes at best.

    Args:
        addresses: byte addresses, shape (requests, 32).
        active: threads that take part, same shape.
        width: bytes of each thread.

    Returns:
        Shape (requests,), at least 1.
    """
    requests = addresses.shape[0]
    words_each = max(1, width // BANK_BYTES)
    words = addresses[:, :, None] // BANK_BYTES + np.arange(words_each)
    hidden = np.iinfo(np.int64).max
    ordered = np.where(active[:, :, None], words, hidden).reshape(requests, -1)
    ordered.sort(axis=1)
    fresh = ordered != hidden
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    slots = (np.arange(requests)[:, None] * BANKS + ordered % BANKS)[fresh]
    counts = np.bincount(slots, minlength=requests * BANKS).reshape(requests, BANKS)
    at_least_one: NDArray[np.int64] = np.maximum(1, counts.max(axis=1))
    return at_least_one


def vector_runs(offsets: Sequence[int], element_bytes: int, max_bytes: int) -> dict[int, int]:
    """How aligned, contiguous elements combine into wide accesses: {elements in one access: accesses}.

    Args:
        offsets: different addresses in elements, ascending.
        element_bytes: size of an element.
        max_bytes: widest access of one thread.
    """
    runs: dict[int, int] = {}
    widest = max(1, max_bytes // element_bytes)
    for _, group in itertools.groupby(enumerate(offsets), key=lambda item: item[1] - item[0]):
        addresses = [address for _, address in group]
        position = 0
        while position < len(addresses):
            width = widest
            while width > 1 and (addresses[position] % width or position + width > len(addresses)):
                width //= 2
            runs[width] = runs.get(width, 0) + 1
            position += width
    return runs
