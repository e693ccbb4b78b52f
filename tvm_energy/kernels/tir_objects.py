"""Reading TVM's expressions and buffers, whose Python faces differ between TVM 0.19, 0.26 and 0.27."""

from __future__ import annotations

import math
import re
from typing import Any

LOADS = ("BufferLoad", "TensorLoad")  # TVM 0.26 and 0.27


class BufferNames:
    """One name for each piece of memory, whatever views of it are declared.

    TVM 0.27 makes a buffer a variable of its own, and its ``data`` a call that names the buffer; in
    0.26 ``data`` is the variable.
    """

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def declare(self, statement: Any) -> None:
        """Note a view: ``DeclBuffer``."""
        data = getattr(statement, "data", None)
        if data is not None:
            self._roots[hash(statement.buffer)] = self._root(data)

    def of(self, buffer: Any) -> str:
        """The name of a buffer's memory."""
        return self.of_data(buffer.data, self._roots.get(hash(buffer)))

    def of_data(self, data: Any, root: int | None = None) -> str:
        """The name of the memory behind a pointer."""
        root = self._root(data) if root is None else root
        if root not in self._names:
            name = str(data_variable(data).name)
            taken = set(self._names.values())
            self._names[root] = name if name not in taken else f"{name}_{len(taken)}"
        return self._names[root]

    def _root(self, data: Any) -> int:
        key = hash(data_variable(data))
        return self._roots.get(key, key)


def data_variable(data: Any) -> Any:
    """The variable behind a pointer expression."""
    return data.args[0] if type(data).__name__ == "Call" else data


def is_kernel(statement: Any) -> bool:
    """True for the outermost statement of a kernel: it binds a thread index."""
    return type(statement).__name__ == "AttrStmt" and statement.attr_key in (
        "thread_extent",
        "virtual_thread",
    )


def sub_statements(statement: Any) -> list[Any]:
    """Statements directly inside a statement."""
    if type(statement).__name__ == "SeqStmt":
        return list(statement.seq)
    if type(statement).__name__ == "IfThenElse":
        branches = (statement.then_case, statement.else_case)
        return [item for item in branches if item is not None]
    body = getattr(statement, "body", None)
    return [] if body is None else [body]


def dtype(expression: Any) -> str:
    """Type name of an expression: TVM 0.27 calls it ``ty``, 0.26 ``dtype``."""
    found = getattr(expression, "ty", None)
    return str(expression.dtype if found is None else found)


def is_integer(expression: Any) -> bool:
    """True for integers and booleans."""
    return dtype(expression).startswith(("int", "uint", "bool"))


def arithmetic_unit(expression: Any) -> str:
    """Name in `Instructions` of the unit that computes with this type."""
    name = dtype(expression)
    if name.startswith(("int", "uint", "bool")):
        return "integer"
    if name.startswith("float64"):
        return "fp64"
    return "fp32" if name.startswith("float32") else "fp16"


def type_bytes(name: str) -> int:
    """Size of a value of the named type, at least 1."""
    bits = re.search(r"(\d+)", name.replace("bfloat", ""))
    return max(1, int(bits.group(1)) // 8) if bits else 1


def element_bytes(buffer: Any) -> int:
    """Size of a buffer's element."""
    return type_bytes(str(buffer.dtype))


def element_count(buffer: Any) -> int:
    """Elements of a buffer."""
    return math.prod(integer(extent, 1) for extent in buffer.shape)


def scope_of(buffer: Any) -> str:
    """Where a buffer lives: ``global``, ``shared`` or ``local``."""
    return scope_kind(str(buffer.scope()))


def scope_kind(scope: str) -> str:
    """TVM's storage scopes by kind; tensor core fragments are registers, so ``local``."""
    if scope.startswith("shared"):
        return "shared"
    return "global" if scope in ("", "global") else "local"


def pointer_scope(data: Any) -> str:
    """Where a pointer points: ``global``, ``shared`` or ``local``."""
    return scope_kind(pointer_storage(data))


def pointer_storage(data: Any) -> str:
    """TVM's storage scope behind a pointer."""
    variable = data_variable(data)
    if hasattr(variable, "scope"):
        return str(variable.scope())
    annotation = getattr(variable, "type_annotation", None)
    return str(getattr(annotation, "storage_scope", "") or "")


def integer(expression: Any, default: int) -> int:
    """The value of a constant, or the default."""
    if isinstance(expression, int):
        return expression
    value = getattr(expression, "value", None)
    return int(value) if isinstance(value, int) else default


def call_name(expression: Any) -> str:
    """Name of the called function, without its dialect."""
    operation = expression.op
    name = str(getattr(operation, "name", operation))
    if name == "tirx.call_pure_extern" or name.endswith(("call_extern", "call_pure_extern")):
        return str(getattr(expression.args[0], "value", name))
    return name.rsplit(".", 1)[-1]


def loaded(expression: Any) -> Any:
    """The buffer that a load reads."""
    source = getattr(expression, "source", None)
    return expression.buffer if source is None else source


def reads_memory(expression: Any) -> bool:
    """True when an expression holds a load."""
    kind = type(expression).__name__
    if kind in LOADS:
        return True
    if kind == "Call":
        return any(reads_memory(item) for item in expression.args)
    operands = ("a", "b", "value", "condition", "true_value", "false_value", "base")
    return kind not in ("IntImm", "FloatImm", "StringImm", "Var") and any(
        reads_memory(item)
        for item in (getattr(expression, name, None) for name in operands)
        if item is not None
    )


def access_pointer(expression: Any) -> Any:
    """The outermost ``tvm_access_ptr`` among the arguments of a call that leaves registers, or None."""
    pointers = [
        item
        for item in expression.args
        if type(item).__name__ == "Call" and call_name(item) == "tvm_access_ptr"
    ]
    outside = [item for item in pointers if pointer_scope(item.args[1]) != "local"]
    return outside[0] if outside else None


def mma_flops(expression: Any) -> float:
    """Floating-point operations of a PTX mma, by the shape in its name."""
    shape = re.search(r"m(\d+)n(\d+)k(\d+)", " ".join(str(item) for item in expression.args[:2]))
    m, n, k = (int(item) for item in shape.groups()) if shape else (16, 8, 16)
    return 2.0 * m * n * k
