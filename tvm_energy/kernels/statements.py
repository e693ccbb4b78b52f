"""The code of one GPU kernel, as TVM lowered it, turned into the trees of `loop_nest`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tvm_energy.kernels.tir_objects import (
    LOADS,
    BufferNames,
    access_pointer,
    arithmetic_unit,
    call_name,
    dtype,
    element_bytes,
    element_count,
    integer,
    is_integer,
    loaded,
    mma_flops,
    pointer_scope,
    pointer_storage,
    reads_memory,
    scope_kind,
    scope_of,
    type_bytes,
)
from tvm_energy.simulation import addresses
from tvm_energy.simulation.addresses import Node, const, var
from tvm_energy.simulation.loop_nest import LANE, Access, Branch, Kernel, Loop, Statement, Tree

_BINARY = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Div": "truncdiv",
    "Mod": "truncmod",
    "Min": "min",
    "Max": "max",
    "LT": "<",
    "LE": "<=",
    "GT": ">",
    "GE": ">=",
    "EQ": "==",
    "NE": "!=",
    "And": "and",
    "Or": "or",
}
#: Values of TVM's ``ForKind``; the others run one after the other.
_FOR_KINDS = {2: "vector", 3: "unrolled"}
_CALLS = {
    "shift_left": "<<",
    "shift_right": ">>",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}
_SPECIAL = (
    "exp",
    "log",
    "sqrt",
    "tanh",
    "sin",
    "cos",
    "tan",
    "pow",
    "erf",
    "sigmoid",
    "rcp",
    "fast",
)
_SIMPLE = (
    "fabs",
    "abs",
    "floor",
    "ceil",
    "round",
    "trunc",
    "nearbyint",
    "copysign",
    "isnan",
    "isinf",
)


class DeviceCode:
    """Turns the body of one kernel into a tree."""

    def __init__(self, name: str, unroll_steps: int, names: BufferNames) -> None:
        self.names = names
        self.kernel = Kernel(name=name, unroll_steps=unroll_steps)
        self.extents: dict[str, int] = {}
        self.tags: dict[str, Hashable] = {}
        self.bound: dict[Hashable, Node] = {}
        self.shared: dict[str, int] = {}

    def finish(self, body: list[Tree], dynamic_shared_bytes: int) -> Kernel:
        """Put the tree, the thread extents, x first, and all shared memory into the kernel."""
        kernel = self.kernel
        for tag in sorted(self.tags):
            key, extent = self.tags[tag], self.extents[tag]
            if tag.startswith("blockIdx"):
                kernel.blocks[key] = extent
            elif tag.startswith("threadIdx"):
                kernel.threads[key] = extent
            else:
                kernel.vthreads[key] = extent
        kernel.shared_bytes = sum(self.shared.values()) + dynamic_shared_bytes
        kernel.body = body
        return kernel

    # ---- statements ----------------------------------------------------------------------------

    def tree(self, statement: Any) -> list[Tree]:
        """The trees of a statement."""
        kind = type(statement).__name__
        handler = getattr(self, f"_{kind.lower()}", None)
        if handler is not None:
            trees: list[Tree] = handler(statement)
            return trees
        return self._inside(statement)

    def _seqstmt(self, statement: Any) -> list[Tree]:
        return [tree for item in statement.seq for tree in self.tree(item)]

    def _attrstmt(self, statement: Any) -> list[Tree]:
        key = statement.attr_key
        if key in ("thread_extent", "virtual_thread"):
            self._thread(statement.node, integer(statement.value, 1))
        elif key == "pragma_auto_unroll_max_step":
            self.kernel.unroll_steps = max(self.kernel.unroll_steps, integer(statement.value, 0))
        elif key in ("async_commit_queue_scope", "async_wait_queue_scope"):
            self.kernel.pipelined = True
        return self.tree(statement.body)

    def _thread(self, axis: Any, extent: int) -> None:
        tag = str(axis.thread_tag) or str(axis.var.name)
        if tag in self.tags:
            # The same index bound once more: another name for it.
            self.bound[hash(axis.var)] = var(self.tags[tag])
        else:
            self.tags[tag] = hash(axis.var)
        self.extents[tag] = max(extent, self.extents.get(tag, 0))

    def _for(self, statement: Any) -> list[Tree]:
        key = hash(statement.loop_var)
        binding = statement.thread_binding
        if binding is not None:
            self._thread_loop(statement)
            return self.tree(statement.body)
        start = self.index(statement.min)
        if start != const(0):
            shifted = ("loop", key)
            self.bound[key] = ("+", var(shifted), start)
            key_of_loop: Hashable = shifted
        else:
            self.bound.pop(key, None)
            key_of_loop = key
        loop = Loop(
            key_of_loop,
            self.index(statement.extent),
            _FOR_KINDS.get(int(statement.kind), "serial"),
            self.tree(statement.body),
        )
        return [loop]

    def _thread_loop(self, statement: Any) -> None:
        tag = str(statement.thread_binding.thread_tag)
        if tag in self.tags:
            self.bound[hash(statement.loop_var)] = var(self.tags[tag])
        else:
            self.tags[tag] = hash(statement.loop_var)
        extent = integer(statement.extent, 1)
        self.extents[tag] = max(extent, self.extents.get(tag, 0))

    def _ifthenelse(self, statement: Any) -> list[Tree]:
        otherwise = [] if statement.else_case is None else self.tree(statement.else_case)
        return [Branch(self.index(statement.condition), self.tree(statement.then_case), otherwise)]

    def _while(self, statement: Any) -> list[Tree]:
        # Trip counts of data-dependent loops are not known: once.
        return self.tree(statement.body)

    def _bind(self, statement: Any) -> list[Tree]:
        if is_integer(statement.value):
            self.bound[hash(statement.var)] = self.index(statement.value)
            return []
        reader = _Expression(self)
        reader.value(statement.value, ())
        return [reader.statement()]

    def _declbuffer(self, statement: Any) -> list[Tree]:
        self.names.declare(statement)
        return self._inside(statement)

    def _allocbuffer(self, statement: Any) -> list[Tree]:
        self.allocate(statement.buffer)
        return []

    def _allocate(self, statement: Any) -> list[Tree]:
        """TVM up to 0.19 allocates a pointer for a body; buffers are views of it."""
        name = self.names.of_data(statement.buffer_var)
        size = math.prod(integer(extent, 1) for extent in statement.extents)
        self._note_size(
            name, pointer_storage(statement.buffer_var), size * type_bytes(str(statement.dtype))
        )
        return self.tree(statement.body)

    def _letstmt(self, statement: Any) -> list[Tree]:
        return self._bind(statement) + self.tree(statement.body)

    def _inside(self, statement: Any) -> list[Tree]:
        """The body of a statement that has one in some versions of TVM only."""
        body = getattr(statement, "body", None)
        return [] if body is None else self.tree(body)

    def allocate(self, buffer: Any) -> None:
        """Note the size of a buffer that lives in shared memory or registers."""
        size = element_count(buffer) * element_bytes(buffer)
        self._note_size(self.names.of(buffer), str(buffer.scope()), size)

    def _note_size(self, name: str, storage: str, size: int) -> None:
        if storage.startswith("shared"):
            if storage != "shared.dyn":
                self.shared[name] = size
        elif storage.startswith("wmma"):
            self.kernel.local_bytes[name] = size // 32  # a fragment is spread over the warp
        elif scope_kind(storage) == "local":
            self.kernel.local_bytes[name] = size

    def _bufferstore(self, statement: Any) -> list[Tree]:
        reader = _Expression(self)
        reader.value(statement.value, ())
        reader.access(statement.buffer, statement.indices, store=True, conditions=())
        return [reader.statement()]

    def _evaluate(self, statement: Any) -> list[Tree]:
        reader = _Expression(self)
        reader.intrinsic(statement.value)
        return [reader.statement()]

    # ---- index expressions -----------------------------------------------------------------------

    def index(self, expression: Any) -> Node:
        """An integer or boolean expression as a `Node`."""
        kind = type(expression).__name__
        if kind == "IntImm":
            return const(int(expression.value))
        if kind == "Var":
            key = hash(expression)
            return self.bound.get(key, var(key))
        if kind in _BINARY:
            return _fold(_BINARY[kind], self.index(expression.a), self.index(expression.b))
        if kind == "Not":
            return ("not", self.index(expression.a))
        if kind == "Cast":
            return self.index(expression.value)
        if kind == "Select":
            return (
                "select",
                self.index(expression.condition),
                self.index(expression.true_value),
                self.index(expression.false_value),
            )
        if kind == "Call":
            return self._index_call(expression)
        if kind in LOADS and expression.indices:
            return ("scatter", self.index(expression.indices[-1]))
        return ("scatter", const(0))

    def _index_call(self, expression: Any) -> Node:
        name = call_name(expression)
        if name in _CALLS:
            return (_CALLS[name], *(self.index(item) for item in expression.args[:2]))
        if name == "if_then_else":
            return ("select", *(self.index(item) for item in expression.args[:3]))
        if name in ("likely", "reinterpret") and len(expression.args) == 1:
            return self.index(expression.args[0])
        return ("scatter", const(0))


class _Expression:
    """Collects the operations and accesses of one statement."""

    def __init__(self, device: DeviceCode) -> None:
        self.device = device
        self.accesses: list[Access] = []
        self.operations: dict[str, float] = {}
        self.keys: frozenset[Hashable] = frozenset()

    def statement(self) -> Statement:
        """What was collected."""
        keys = self.keys
        for access in self.accesses:
            keys |= access.keys
        return Statement(_once(self.accesses), self.operations, keys)

    def value(self, expression: Any, conditions: tuple[Node, ...]) -> None:
        """Count what computing an expression takes."""
        kind = type(expression).__name__
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return
        if kind == "Var":
            self.keys |= addresses.variables(self.device.index(expression))
        elif kind in LOADS:
            self.access(loaded(expression), expression.indices, store=False, conditions=conditions)
        elif kind in _BINARY:
            self._binary(kind, expression, conditions)
        elif kind == "Select":
            self._choice(
                (expression.condition, expression.true_value, expression.false_value), conditions
            )
        elif kind == "Call":
            self._call(expression, conditions)
        elif kind == "Let":
            self.value(expression.value, conditions)
            self.value(expression.body, conditions)
        else:
            if kind == "Cast" and not is_integer(expression):
                self._add("fp32", 1)
            for name in ("value", "a", "base", "stride"):
                operand = getattr(expression, name, None)
                if operand is not None:
                    self.value(operand, conditions)

    def _binary(self, kind: str, expression: Any, conditions: tuple[Node, ...]) -> None:
        if is_integer(expression) and not reads_memory(expression):
            self.keys |= addresses.variables(self.device.index(expression))
            self._add("integer", 1)
            return
        operands = (expression.a, expression.b)
        unit = arithmetic_unit(expression.a)
        fused = kind in ("Add", "Sub") and any(
            type(item).__name__ == "Mul" and not is_integer(item) for item in operands
        )
        if kind == "Div" and unit != "integer":
            self._add("special", 1)
            self._add("fma32", 4)
        elif fused:
            self._add("fma32" if unit == "fp32" else unit, 1)
        else:
            self._add(unit, 1)
        for item in operands:
            if fused and type(item).__name__ == "Mul":
                fused = False
                self.value(item.a, conditions)
                self.value(item.b, conditions)
            else:
                self.value(item, conditions)

    def _choice(self, parts: Sequence[Any], conditions: tuple[Node, ...]) -> None:
        condition = self.device.index(parts[0]) if not reads_memory(parts[0]) else const(1)
        if condition == const(1):
            self.value(parts[0], conditions)
        self.keys |= addresses.variables(condition)
        self._add("control", 1)
        self.value(parts[1], (*conditions, condition))
        self.value(parts[2], (*conditions, ("not", condition)))

    def _call(self, expression: Any, conditions: tuple[Node, ...]) -> None:
        name = call_name(expression)
        if name == "if_then_else":
            self._choice(expression.args, conditions)
            return
        if any(word in name for word in _SPECIAL):
            self._add("special", 1)
            self._add("fma32", 2)
        elif any(word in name for word in _SIMPLE):
            self._add("fp32", 1)
        elif name in _CALLS:
            self._add("integer", 1)
        elif "shfl" in name or "shuffle" in name:
            self._add("shuffle", 1)
        else:
            self._add("special", 1)
        for argument in expression.args:
            if type(argument).__name__ not in ("StringImm", "str", "int"):
                self.value(argument, conditions)

    # ---- intrinsics ----------------------------------------------------------------------------

    def intrinsic(self, expression: Any) -> None:
        """A call that stands as a statement of its own."""
        if type(expression).__name__ != "Call":
            return
        name = call_name(expression)
        if name == "tvm_storage_sync":
            self._add("barrier", 1)
        elif name == "tvm_thread_allreduce":
            self._all_reduce(expression)
        elif name == "tvm_mma_sync":
            self._add("tensor_flops", 2 * 16 * 16 * 16)
        elif name == "tvm_fill_fragment":
            self._add("fp32", 8)
        elif name in ("tvm_load_matrix_sync", "tvm_store_matrix_sync"):
            self._matrix(expression, store="store" in name)
        elif "ptx_mma" in name:
            self._add("tensor_flops", mma_flops(expression))
        elif "ldmatrix" in name:
            self._pointer(expression, store=False)
        elif "mma_store" in name or (
            "async" in name and "commit" not in name and "wait" not in name
        ):
            self._pointer(expression, store=True)
        elif "mma_fill" in name:
            self._add("fp32", 8)
        else:
            self._call(expression, ())

    def _all_reduce(self, expression: Any) -> None:
        """Sum over threads: shuffles within warps, then shared memory among warps."""
        arguments = list(expression.args)
        values = integer(arguments[0], 1)
        for value in arguments[1 : 1 + values]:
            self.value(value, ())
        axes = [hash(item) for item in arguments[2 + 2 * values :] if hasattr(item, "name")]
        tags = {key: self.device.extents[tag] for tag, key in self.device.tags.items()}
        threads = math.prod(tags.get(key, 1) for key in axes) or 1
        rounds = math.ceil(math.log2(max(2, min(threads, 32))))
        if threads > 32:
            rounds += math.ceil(math.log2(max(2, math.ceil(threads / 32))))
            self._add("barrier", 2)
            self._add("integer", 8)
        self._add("shuffle", rounds * values)
        self._add("fp32", rounds * values)
        for result in arguments[2 + values : 2 + 2 * values]:
            if type(result).__name__ in LOADS:
                self.access(loaded(result), result.indices, store=True, conditions=())

    def _matrix(self, expression: Any, *, store: bool) -> None:
        """A 16 x 16 fragment between a warp and memory: rows over lanes, 8 columns a lane."""
        pointer = access_pointer(expression)
        stride = next(
            (item for item in reversed(expression.args) if type(item).__name__ == "IntImm"), None
        )
        if pointer is None:
            self._add("special", 1)
            return
        row = ("*", ("%", var(LANE), const(16)), const(integer(stride, 16)))
        column = ("*", ("//", var(LANE), const(16)), const(8))
        self._pointer_access(pointer, ("+", row, column), store)

    def _pointer(self, expression: Any, *, store: bool) -> None:
        pointer = access_pointer(expression)
        if pointer is None:
            self._add("special", 1)
            return
        self._pointer_access(pointer, ("*", var(LANE), const(8)), store)

    def _pointer_access(self, pointer: Any, lanes: Node, store: bool) -> None:
        kind, data, offset, extent = pointer.args[:4]
        scope = pointer_scope(data)
        element = type_bytes(str(dtype(kind)))
        access = Access(
            buffer=self.device.names.of_data(data),
            scope=scope,
            element_bytes=element,
            elements=max(256, integer(extent, 256)),
            index=("+", self.device.index(offset), lanes),
            store=store,
            width=8,
        )
        if scope != "local":
            self.accesses.append(access)

    # ---- accesses ------------------------------------------------------------------------------

    def access(
        self, buffer: Any, indices: Sequence[Any], *, store: bool, conditions: tuple[Node, ...]
    ) -> None:
        """Note a load or store."""
        flat: Node = const(0)
        for extent, item in zip(buffer.shape, indices, strict=False):
            lanes = getattr(item, "base", None)
            part = self.device.index(item if lanes is None else lanes)
            flat = _fold("+", _fold("*", flat, const(integer(extent, 1))), part)
            if reads_memory(item):
                self.value(item, conditions)
        self.accesses.append(
            Access(
                buffer=self.device.names.of(buffer),
                scope=scope_of(buffer),
                element_bytes=element_bytes(buffer),
                elements=element_count(buffer),
                index=flat,
                store=store,
                conditions=tuple(item for item in conditions if item != const(1)),
            )
        )

    def _add(self, name: str, count: float) -> None:
        self.operations[name] = self.operations.get(name, 0.0) + count


def _once(accesses: list[Access]) -> list[Access]:
    """Accesses without repetitions: a compiler loads the same address once in a statement."""
    seen: dict[tuple[Any, ...], Access] = {}
    for item in accesses:
        key = (item.buffer, item.index, item.store)
        known = seen.get(key)
        if known is None:
            seen[key] = item
        elif known.conditions != item.conditions:
            seen[key] = replace(known, conditions=())
    return list(seen.values())


def _fold(operator: str, a: Node, b: Node) -> Node:
    """An operation, worked out where both sides are numbers."""
    if a[0] == "const" and b[0] == "const":
        return const(int(np.asarray(addresses.evaluate((operator, a, b), {}))))
    if operator == "+" and a == const(0):
        return b
    if operator in "+-" and b == const(0):
        return a
    if operator == "*" and b == const(1):
        return a
    if operator == "*" and const(0) in (a, b):
        return const(0)
    return (operator, a, b)
