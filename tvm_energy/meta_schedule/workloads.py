"""Named single-kernel workloads: ``matmul:m=1024,n=1024,k=1024,dtype=float16``.

A workload is one TIR function, the shapes of its arguments, and what it must compute in plain
numpy. Listing and parsing import no TVM; `Workload.primfunc` does. Convolutions, pooling and the
like are TVM's own tensor expressions (``topi``), so that a kernel tuned here is the kernel that a
network of the same shape asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError
from tvm_energy.meta_schedule import workload_references as references
from tvm_energy.spelling import listing, suggestion

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

__all__ = ["Argument", "Parameter", "WORKLOADS", "Workload", "WorkloadSpec", "parse_workload"]

Values = Mapping[str, Any]  #: parameter name -> int (sizes) or str (data types)

#: Elements of one array: TVM indexes with int32, and 2**30 float32 are 4 GiB.
MAX_ELEMENTS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a workload.

    Attributes:
        name: what the user writes before the equals sign.
        meaning: one line for the listing.
        default: value when it is not given; None takes the value of ``dtype``.
        minimum: smallest integer allowed.
        maximum: largest integer allowed.
        choices: the words allowed; empty for an integer.
    """

    name: str
    meaning: str
    default: int | str | None
    minimum: int = 1
    maximum: int = 2**24
    choices: tuple[str, ...] = ()

    def parse(self, text: str) -> int | str:
        """The value that ``text`` stands for.

        Raises:
            ConfigurationError: not one of the choices, no integer, or out of range.
        """
        if self.choices:
            if text not in self.choices:
                hint = suggestion(text, self.choices)
                raise ConfigurationError(
                    f"{self.name}={text!r} is not known; use {listing(self.choices)}{hint}"
                )
            return text
        try:
            value = int(text)
        except ValueError:
            raise ConfigurationError(
                f"{self.name}={text!r} is not an integer ({self.meaning})"
            ) from None
        if not self.minimum <= value <= self.maximum:
            raise ConfigurationError(
                f"{self.name}={value} must be from {self.minimum} to {self.maximum} "
                f"({self.meaning})"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array that the kernel reads or writes, in calling order.

    Attributes:
        name: its buffer's name in the TIR function (outputs are called ``out`` here).
        shape: extents.
        dtype: numpy name of the element type.
        output: whether the kernel writes it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    output: bool = False

    @property
    def size_bytes(self) -> int:
        """Size of the array in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A kind of workload: the parameters it takes, its tensor expression, its numpy meaning.

    Attributes:
        name: what the user writes before the colon.
        summary: the formula, one line.
        parameters: in listing order.
        shapes: parameter values -> array name -> shape; the last array is the output. Raises
            `ConfigurationError` for values that do not fit together.
        compute: parameter values and input tensors -> output tensor (imports TVM).
        reference: parameter values and float64 inputs -> float64 output.
    """

    name: str
    summary: str
    parameters: tuple[Parameter, ...]
    shapes: Callable[[Values], Mapping[str, tuple[int, ...]]]
    compute: Callable[..., Any]
    reference: Callable[..., NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload with all its parameters fixed.

    Attributes:
        name: key in `WORKLOADS`.
        parameters: every parameter, defaults filled in.
        spec: canonical text; `parse_workload` gives this workload back.
        arguments: inputs, then the output.
    """

    name: str
    parameters: Values
    spec: str
    arguments: tuple[Argument, ...]

    def primfunc(self) -> PrimFunc:
        """The TIR function, not scheduled, with ``global_symbol`` "main"."""
        from tvm_energy.meta_schedule import compat

        compat.check_versions()
        from tvm import te

        return te.create_prim_func(self.tensors()).with_attr("global_symbol", "main")

    def tensors(self) -> list[Any]:
        """Inputs and output as tensor expressions of whichever TVM is installed."""
        from tvm import te

        inputs = [
            te.placeholder(item.shape, item.dtype, name=item.name)
            for item in self.arguments
            if not item.output
        ]
        return [*inputs, WORKLOADS[self.name].compute(self.parameters, *inputs)]

    def random_inputs(self, seed: int) -> list[NDArray[Any]]:
        """Inputs spread evenly over [-1, 1): the same seed gives the same arrays.

        Energy depends on the data (a kernel fed with zeros toggles few wires), so kernels are
        never measured on zeros.
        """
        rng = np.random.default_rng(seed)
        return [
            (rng.random(item.shape, dtype=np.float32) * 2 - 1).astype(item.dtype)
            for item in self.arguments
            if not item.output
        ]

    def reference(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """What the kernel must write for ``inputs``: computed in float64, then rounded once.

        Raises:
            ValueError: another number of inputs, or another shape, than `arguments` says.
        """
        expected = [item for item in self.arguments if not item.output]
        if [array.shape for array in inputs] != [item.shape for item in expected]:
            raise ValueError(
                f"{self.spec} takes inputs of shapes {[item.shape for item in expected]}, "
                f"got {[array.shape for array in inputs]}"
            )
        wide = [array.astype(np.float64) for array in inputs]
        result = WORKLOADS[self.name].reference(self.parameters, *wide)
        return [result.astype(self.arguments[-1].dtype)]


def parse_workload(spec: str) -> Workload:
    """Read ``NAME`` or ``NAME:PARAMETER=VALUE,...``; what is not given takes its default.

    Raises:
        ConfigurationError: unknown name or parameter, a value that is wrong or out of range, or
            values that do not fit together. The message lists what is valid.
    """
    name, _, rest = spec.strip().partition(":")
    kind = WORKLOADS.get(name.strip())
    if kind is None:
        raise ConfigurationError(
            f"workload {name!r} is not known; use one of {listing(WORKLOADS)}"
            f"{suggestion(name, WORKLOADS)}"
        )
    values = _fill(kind, _assignments(kind, rest))
    canonical = ",".join(f"{key}={value}" for key, value in values.items())
    return Workload(
        name=kind.name,
        parameters=MappingProxyType(values),
        spec=f"{kind.name}:{canonical}",
        arguments=_arguments(kind, values),
    )


def _assignments(kind: WorkloadSpec, text: str) -> dict[str, int | str]:
    parameters = {parameter.name: parameter for parameter in kind.parameters}
    given: dict[str, int | str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise ConfigurationError(
                f"{item!r} in workload {kind.name!r} is not PARAMETER=VALUE; "
                f"parameters: {listing(parameters)}"
            )
        if key not in parameters:
            raise ConfigurationError(
                f"workload {kind.name!r} has no parameter {key!r}; use one of "
                f"{listing(parameters)}{suggestion(key, parameters)}"
            )
        if key in given:
            raise ConfigurationError(f"parameter {key!r} of workload {kind.name!r} is given twice")
        given[key] = parameters[key].parse(value)
    return given


def _fill(kind: WorkloadSpec, given: Mapping[str, int | str]) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for parameter in kind.parameters:
        default = values["dtype"] if parameter.default is None else parameter.default
        values[parameter.name] = given.get(parameter.name, default)
    if (values["dtype"], values.get("out_dtype")) == ("float32", "float16"):
        raise ConfigurationError(
            "out_dtype=float16 with dtype=float32 would drop the precision of the inputs; "
            "use dtype=float16, or out_dtype=float32"
        )
    return values


def _arguments(kind: WorkloadSpec, values: Values) -> tuple[Argument, ...]:
    shapes = kind.shapes(values)
    output = list(shapes)[-1]
    arguments = tuple(
        Argument(
            name=name,
            shape=shape,
            dtype=values.get("out_dtype", values["dtype"]) if name == output else values["dtype"],
            output=name == output,
        )
        for name, shape in shapes.items()
    )
    for argument in arguments:
        if math.prod(argument.shape) > MAX_ELEMENTS:
            raise ConfigurationError(
                f"{kind.name}: array {argument.name!r} of shape {argument.shape} has more than "
                f"{MAX_ELEMENTS} elements; use smaller sizes"
            )
    return arguments


# ---- shapes -----------------------------------------------------------------------------------


def _window(values: Values, size: str) -> int:
    """Positions of the kernel along one axis of the padded input."""
    reach = (values["kernel"] - 1) * values.get("dilation", 1) + 1
    padded = values[size] + 2 * values["padding"]
    if padded < reach:
        raise ConfigurationError(
            f"kernel={values['kernel']} reaches over {reach} values, but {size}={values[size]} with "
            f"padding={values['padding']} has only {padded}; use a larger {size} or padding"
        )
    return int((padded - reach) // values["stride"] + 1)


def _conv2d_shapes(p: Values) -> dict[str, tuple[int, ...]]:
    for channels in ("ci", "co"):
        if p[channels] % p["groups"]:
            raise ConfigurationError(
                f"groups={p['groups']} does not divide {channels}={p[channels]}; use a divisor"
            )
    return {
        "data": (p["n"], p["ci"], p["h"], p["w"]),
        "weight": (p["co"], p["ci"] // p["groups"], p["kernel"], p["kernel"]),
        "out": (p["n"], p["co"], _window(p, "h"), _window(p, "w")),
    }


def _transpose_shapes(p: Values) -> dict[str, tuple[int, ...]]:
    if p["padding"] >= p["kernel"]:
        raise ConfigurationError(
            f"padding={p['padding']} must be smaller than kernel={p['kernel']} here"
        )
    out = [(p[size] - 1) * p["stride"] + p["kernel"] - 2 * p["padding"] for size in ("h", "w")]
    if min(out) < 1:
        raise ConfigurationError(
            f"padding={p['padding']} leaves nothing of the output; use a smaller padding"
        )
    return {
        "data": (p["n"], p["ci"], p["h"], p["w"]),
        "weight": (p["ci"], p["co"], p["kernel"], p["kernel"]),
        "out": (p["n"], p["co"], out[0], out[1]),
    }


def _pool_shapes(p: Values) -> dict[str, tuple[int, ...]]:
    if 2 * p["padding"] > p["kernel"]:
        raise ConfigurationError(
            f"padding={p['padding']} is more than half of kernel={p['kernel']}: "
            "some windows would hold padding only"
        )
    return {
        "data": (p["n"], p["c"], p["h"], p["w"]),
        "out": (p["n"], p["c"], _window(p, "h"), _window(p, "w")),
    }


# ---- tensor expressions (each imports TVM when it is called) ------------------------------------


def _matvec(p: Values, a: Any, x: Any) -> Any:
    from tvm import te

    k = te.reduce_axis((0, p["k"]), name="k")
    wide = p["out_dtype"]
    return te.compute(
        (p["m"],),
        lambda i: te.sum(a[i, k].astype(wide) * x[k].astype(wide), axis=k),
        name="matvec",
    )


def _dense(p: Values, x: Any, w: Any, b: Any) -> Any:
    from tvm import topi

    product = topi.nn.dense(x, w, out_dtype=p["out_dtype"])
    return topi.nn.relu(topi.add(product, topi.cast(b, p["out_dtype"])))


def _conv2d(p: Values, x: Any, w: Any) -> Any:
    from tvm import topi

    geometry = (p["stride"], p["padding"], p["dilation"])
    if p["groups"] == 1:
        return topi.nn.conv2d_nchw(x, w, *geometry, out_dtype=p["out_dtype"])
    return topi.nn.group_conv2d_nchw(x, w, *geometry, p["groups"], out_dtype=p["out_dtype"])


def _conv2d_transpose(p: Values, x: Any, w: Any) -> Any:
    from tvm import topi

    stride, padding = (p["stride"],) * 2, (p["padding"],) * 2
    return topi.nn.conv2d_transpose_nchw(x, w, stride, padding, p["out_dtype"], (0, 0))


def _pool2d(p: Values, x: Any, kind: str) -> Any:
    from tvm import topi

    def pool(data: Any) -> Any:
        return topi.nn.pool2d(
            data,
            (p["kernel"],) * 2,
            (p["stride"],) * 2,
            (1, 1),
            (p["padding"],) * 4,
            kind,
            count_include_pad=False,
        )

    return pool(x) if kind == "max" else _in_float32(pool, x)


def _in_float32(operation: Callable[[Any], Any], x: Any) -> Any:
    """Apply ``operation`` in float32: a float16 sum of thousands of terms stops growing."""
    from tvm import topi

    if x.dtype == "float32":
        return operation(x)
    return topi.cast(operation(topi.cast(x, "float32")), x.dtype)


def _topi() -> Any:
    from tvm import topi

    return topi


# ---- the table --------------------------------------------------------------------------------

_TYPES = ("float32", "float16")
_DTYPE = Parameter(name="dtype", meaning="type of the inputs", default="float32", choices=_TYPES)
_OUT_DTYPE = Parameter(
    name="out_dtype",
    meaning="type of the sums and of the output (default: dtype)",
    default=None,
    choices=_TYPES,
)


def _size(name: str, meaning: str, default: int, maximum: int = 2**24) -> Parameter:
    return Parameter(name=name, meaning=meaning, default=default, maximum=maximum)


def _window_parameters(kernel: int, stride: int, padding: int) -> tuple[Parameter, ...]:
    return (
        _size("kernel", "kernel height and width", kernel, 64),
        _size("stride", "step of the kernel", stride, 64),
        Parameter(
            name="padding", meaning="border on every side", default=padding, minimum=0, maximum=64
        ),
    )


_DILATION = _size("dilation", "distance between kernel taps", 1, 64)
_N = _size("n", "batch", 1, 65536)
_H, _W = _size("h", "input height", 56, 65536), _size("w", "input width", 56, 65536)
_CI = _size("ci", "input channels", 64, 65536)
_CO = _size("co", "output channels", 64, 65536)
_C = _size("c", "channels", 64, 65536)
_ROWS = _size("rows", "independent rows", 4096)
_COLS = _size("cols", "values in a row", 1024)
_SIZE = _size("size", "number of values", 2**22, MAX_ELEMENTS)
_EPSILON = 1e-5

_SPECS = (
    WorkloadSpec(
        name="matmul",
        summary="out[m,n] = sum_k a[m,k] b[k,n]",
        parameters=(
            _size("m", "rows of a", 1024),
            _size("n", "columns of b", 1024),
            _size("k", "length of the sums", 1024),
            _DTYPE,
            _OUT_DTYPE,
        ),
        shapes=lambda p: {"a": (p["m"], p["k"]), "b": (p["k"], p["n"]), "out": (p["m"], p["n"])},
        compute=lambda p, a, b: _topi().nn.matmul(a, b, out_dtype=p["out_dtype"]),
        reference=lambda p, a, b: a @ b,
    ),
    WorkloadSpec(
        name="batch_matmul",
        summary="out[b,m,n] = sum_k x[b,m,k] y[b,k,n]",
        parameters=(
            _size("b", "matrices", 12, 65536),
            _size("m", "rows of x", 128),
            _size("n", "columns of y", 128),
            _size("k", "length of the sums", 64),
            _DTYPE,
            _OUT_DTYPE,
        ),
        shapes=lambda p: {
            "x": (p["b"], p["m"], p["k"]),
            "y": (p["b"], p["k"], p["n"]),
            "out": (p["b"], p["m"], p["n"]),
        },
        compute=lambda p, x, y: _topi().nn.batch_matmul(
            x, y, out_dtype=p["out_dtype"], transpose_a=False, transpose_b=False
        ),
        reference=lambda p, x, y: x @ y,
    ),
    WorkloadSpec(
        name="matvec",
        summary="out[m] = sum_k a[m,k] x[k]",
        parameters=(
            _size("m", "rows of a", 4096),
            _size("k", "length of the sums", 4096),
            _DTYPE,
            _OUT_DTYPE,
        ),
        shapes=lambda p: {"a": (p["m"], p["k"]), "x": (p["k"],), "out": (p["m"],)},
        compute=_matvec,
        reference=lambda p, a, x: a @ x,
    ),
    WorkloadSpec(
        name="dense",
        summary="out[m,n] = relu(sum_k x[m,k] weight[n,k] + bias[n])",
        parameters=(
            _size("m", "rows of x (batch)", 128),
            _size("n", "output features", 3072),
            _size("k", "input features", 768),
            _DTYPE,
            _OUT_DTYPE,
        ),
        shapes=lambda p: {
            "x": (p["m"], p["k"]),
            "weight": (p["n"], p["k"]),
            "bias": (p["n"],),
            "out": (p["m"], p["n"]),
        },
        compute=_dense,
        reference=lambda p, x, w, b: np.maximum(x @ w.T + b, 0),
    ),
    WorkloadSpec(
        name="conv2d",
        summary="2-D convolution, NCHW, weight (co, ci/groups, kernel, kernel)",
        parameters=(
            *(_N, _CI, _H, _W, _CO),
            *_window_parameters(3, 1, 1),
            _DILATION,
            _size("groups", "groups of channels", 1, 65536),
            *(_DTYPE, _OUT_DTYPE),
        ),
        shapes=_conv2d_shapes,
        compute=_conv2d,
        reference=lambda p, x, w: references.conv2d(
            x, w, **_geometry(p), dilation=p["dilation"], groups=p["groups"]
        ),
    ),
    WorkloadSpec(
        name="conv2d_nhwc",
        summary="2-D convolution, NHWC, weight (kernel, kernel, ci, co)",
        parameters=(
            *(_N, _H, _W, _CI, _CO),
            *_window_parameters(3, 1, 1),
            *(_DILATION, _DTYPE, _OUT_DTYPE),
        ),
        shapes=lambda p: {
            "data": (p["n"], p["h"], p["w"], p["ci"]),
            "weight": (p["kernel"], p["kernel"], p["ci"], p["co"]),
            "out": (p["n"], _window(p, "h"), _window(p, "w"), p["co"]),
        },
        compute=lambda p, x, w: _topi().nn.conv2d_nhwc(
            x, w, p["stride"], p["padding"], p["dilation"], out_dtype=p["out_dtype"]
        ),
        reference=lambda p, x, w: references.conv2d(
            x.transpose(0, 3, 1, 2),
            w.transpose(3, 2, 0, 1),
            **_geometry(p),
            dilation=p["dilation"],
            groups=1,
        ).transpose(0, 2, 3, 1),
    ),
    WorkloadSpec(
        name="depthwise_conv2d",
        summary="2-D convolution of each channel by itself, NCHW, weight (c, 1, kernel, kernel)",
        parameters=(
            *(_N, _C, _H, _W),
            *_window_parameters(3, 1, 1),
            *(_DILATION, _DTYPE, _OUT_DTYPE),
        ),
        shapes=lambda p: {
            "data": (p["n"], p["c"], p["h"], p["w"]),
            "weight": (p["c"], 1, p["kernel"], p["kernel"]),
            "out": (p["n"], p["c"], _window(p, "h"), _window(p, "w")),
        },
        compute=lambda p, x, w: _topi().nn.depthwise_conv2d_nchw(
            x, w, p["stride"], p["padding"], p["dilation"], out_dtype=p["out_dtype"]
        ),
        reference=lambda p, x, w: references.conv2d(
            x, w, **_geometry(p), dilation=p["dilation"], groups=p["c"]
        ),
    ),
    WorkloadSpec(
        name="conv1d",
        summary="1-D convolution, NCW, weight (co, ci, kernel)",
        parameters=(
            *(_N, _CI, _size("length", "input length", 256), _CO),
            *_window_parameters(3, 1, 1),
            *(_DILATION, _DTYPE, _OUT_DTYPE),
        ),
        shapes=lambda p: {
            "data": (p["n"], p["ci"], p["length"]),
            "weight": (p["co"], p["ci"], p["kernel"]),
            "out": (p["n"], p["co"], _window(p, "length")),
        },
        compute=lambda p, x, w: _topi().nn.conv1d_ncw(
            x, w, p["stride"], p["padding"], p["dilation"], out_dtype=p["out_dtype"]
        ),
        reference=lambda p, x, w: references.conv1d(x, w, **_geometry(p), dilation=p["dilation"]),
    ),
    WorkloadSpec(
        name="conv2d_transpose",
        summary="2-D transposed convolution, NCHW, weight (ci, co, kernel, kernel)",
        parameters=(
            *(_N, _CI),
            *(_size("h", "input height", 28, 65536), _size("w", "input width", 28, 65536), _CO),
            *_window_parameters(4, 2, 1),
            *(_DTYPE, _OUT_DTYPE),
        ),
        shapes=_transpose_shapes,
        compute=_conv2d_transpose,
        reference=lambda p, x, w: references.conv2d_transpose(x, w, **_geometry(p)),
    ),
    WorkloadSpec(
        name="max_pool2d",
        summary="largest value of each window, NCHW",
        parameters=(*(_N, _C, _H, _W), *_window_parameters(3, 2, 1), _DTYPE),
        shapes=_pool_shapes,
        compute=lambda p, x: _pool2d(p, x, "max"),
        reference=lambda p, x: references.max_pool2d(x, kernel=p["kernel"], **_geometry(p)),
    ),
    WorkloadSpec(
        name="avg_pool2d",
        summary="mean of each window without its padding, NCHW; float16 is summed in float32",
        parameters=(*(_N, _C, _H, _W), *_window_parameters(3, 2, 1), _DTYPE),
        shapes=_pool_shapes,
        compute=lambda p, x: _pool2d(p, x, "avg"),
        reference=lambda p, x: references.avg_pool2d(x, kernel=p["kernel"], **_geometry(p)),
    ),
    WorkloadSpec(
        name="softmax",
        summary="softmax of each row; float16 is summed in float32",
        parameters=(_ROWS, _COLS, _DTYPE),
        shapes=lambda p: {"x": (p["rows"], p["cols"]), "out": (p["rows"], p["cols"])},
        compute=lambda p, x: _in_float32(lambda row: _topi().nn.softmax(row, 1), x),
        reference=lambda p, x: references.softmax(x),
    ),
    WorkloadSpec(
        name="layernorm",
        summary="(x - mean) / sqrt(var + 1e-5) * gamma + beta in each row, summed in float32",
        parameters=(_ROWS, _COLS, _DTYPE),
        shapes=lambda p: {
            "x": (p["rows"], p["cols"]),
            "gamma": (p["cols"],),
            "beta": (p["cols"],),
            "out": (p["rows"], p["cols"]),
        },
        compute=lambda p, x, g, b: _topi().nn.layer_norm(x, g, b, [1], _EPSILON),
        reference=lambda p, x, g, b: references.layernorm(x, g, b, epsilon=_EPSILON),
    ),
    WorkloadSpec(
        name="reduce_sum",
        summary="out[rows] = sum of each row; float16 is summed in float32",
        parameters=(_ROWS, _COLS, _DTYPE),
        shapes=lambda p: {"x": (p["rows"], p["cols"]), "out": (p["rows"],)},
        compute=lambda p, x: _in_float32(lambda row: _topi().sum(row, 1), x),
        reference=lambda p, x: x.sum(axis=1),
    ),
    WorkloadSpec(
        name="add",
        summary="out = x + y, value by value",
        parameters=(_SIZE, _DTYPE),
        shapes=lambda p: {"x": (p["size"],), "y": (p["size"],), "out": (p["size"],)},
        compute=lambda p, x, y: _topi().add(x, y),
        reference=lambda p, x, y: x + y,
    ),
    WorkloadSpec(
        name="relu",
        summary="out = max(x, 0), value by value",
        parameters=(_SIZE, _DTYPE),
        shapes=lambda p: {"x": (p["size"],), "out": (p["size"],)},
        compute=lambda p, x: _topi().nn.relu(x),
        reference=lambda p, x: np.maximum(x, 0),
    ),
)


def _geometry(p: Values) -> dict[str, int]:
    return {"stride": p["stride"], "padding": p["padding"]}


#: Every workload by name, in listing order.
WORKLOADS: Mapping[str, WorkloadSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
