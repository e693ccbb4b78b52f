"""Seeded random weights for ONNX networks that come without meaningful ones.

The light model-zoo networks in the ``onnx`` package carry constant weights (every value the same,
most of them made by ``ConstantOfShape`` nodes): whatever the input, every output is the same, so a
wrong kernel would go unnoticed. `with_random_weights` draws each weight at a scale that keeps
activations near 1, so that outputs depend on the input and on every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["with_random_weights"]

Shape = tuple[int, ...]
Draw = Callable[[np.random.Generator, Shape], NDArray[Any]]

#: Operators that hand their first input on with the same values in another form.
_PASS_THROUGH = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


@dataclass(frozen=True, slots=True)
class _Constant:
    """A float tensor whose value the graph itself fixes."""

    shape: Shape
    dtype: np.dtype[Any]


def with_random_weights(model: ModelProto, seed: int) -> ModelProto:
    """A copy of ``model`` whose weights are random: the same seed gives the same weights.

    A weight is a float tensor that the graph fixes (an initializer, a ``Constant`` node, or a
    ``ConstantOfShape`` node of fixed shape) and that reaches a weight input of a layer. Layers with
    fan-in n get a normal distribution with variance 2/n (He et al., "Delving deep into rectifiers",
    arXiv:1502.01852); biases and means a small one; normalisation scales and variances, and
    multiplied constants, stay positive and near 1 (our choice). Other constants (epsilons, clip
    bounds, shapes, single numbers) are kept. Subgraphs of ``If`` and ``Loop`` are left alone.

    Args:
        model: an ONNX model; it is not changed.
        seed: of the generator.

    Returns:
        The same network with new initializers; initializers are no longer listed as graph inputs.
    """
    import onnx
    from onnx import numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    # Up to IR version 3 every initializer had to be a graph input as well.
    copy.ir_version = max(copy.ir_version, 4)
    graph = copy.graph
    rng = np.random.default_rng(seed)
    fresh = {}
    for name, constant in sorted(_float_constants(graph).items()):
        draw = _role(graph, name, constant.shape)
        if draw is not None:
            values = draw(rng, constant.shape).astype(constant.dtype)
            fresh[name] = numpy_helper.from_array(values, name)
    _replace(graph, fresh)
    return copy


def _float_constants(graph: GraphProto) -> dict[str, _Constant]:
    from onnx import numpy_helper

    initializers = {tensor.name: tensor for tensor in graph.initializer}
    tensors = dict(initializers)
    shaped: dict[str, tuple[str, Any]] = {}
    for node in graph.node:
        value = next((item.t for item in node.attribute if item.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            tensors[node.output[0]] = value
        elif node.op_type == "ConstantOfShape":
            fill = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
            shaped[node.output[0]] = (node.input[0], fill.dtype)
    found = {
        name: _Constant(tuple(tensor.dims), _dtype(tensor)) for name, tensor in tensors.items()
    }
    for name, (source, dtype) in shaped.items():
        if source in tensors:
            shape = numpy_helper.to_array(tensors[source])
            found[name] = _Constant(tuple(int(size) for size in shape), dtype)
    return {
        name: constant
        for name, constant in found.items()
        if constant.dtype.kind == "f" and int(np.prod(constant.shape)) > 1
    }


def _dtype(tensor: Any) -> np.dtype[Any]:
    from onnx import helper

    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))


def _role(graph: GraphProto, name: str, shape: Shape) -> Draw | None:
    """How to draw the values of constant ``name``, from the first layer that it reaches."""
    for node in graph.node:
        for index, consumed in enumerate(node.input):
            if consumed != name:
                continue
            if node.op_type in _PASS_THROUGH and index == 0:
                draw = _role(graph, node.output[0], _moved(graph, node, shape))
            else:
                draw = _layer_role(node, index, shape)
            if draw is not None:
                return draw
    return None


def _moved(graph: GraphProto, node: NodeProto, shape: Shape) -> Shape:
    """The shape after a pass-through node, as far as it decides a fan-in."""
    from onnx import numpy_helper

    if node.op_type == "Transpose":
        order = next((item.ints for item in node.attribute if item.name == "perm"), None)
        return tuple(shape[axis] for axis in order) if order else shape[::-1]
    if node.op_type == "Reshape":
        target = next((t for t in graph.initializer if t.name == node.input[1]), None)
        if target is not None:
            sizes = [int(size) for size in numpy_helper.to_array(target)]
            kept = [size or shape[axis] for axis, size in enumerate(sizes)]  # 0 copies
            rest = int(np.prod([size for size in kept if size > 0]))
            return tuple(int(np.prod(shape)) // rest if size < 0 else size for size in kept)
    return shape


def _layer_role(node: NodeProto, index: int, shape: Shape) -> Draw | None:
    operator = node.op_type
    fan_in = _fan_in(node, index, shape)
    if fan_in is not None:
        return _normal(float(np.sqrt(2.0 / fan_in)))
    if operator in _ROLES:
        return _ROLES[operator].get(index)
    return None


def _fan_in(node: NodeProto, index: int, shape: Shape) -> int | None:
    """Products added up for one output value, when input ``index`` is a layer's weight."""
    if node.op_type == "Conv" and index == 1:
        return int(np.prod(shape[1:]))
    if node.op_type == "ConvTranspose" and index == 1:
        return int(shape[0] * np.prod(shape[2:]))
    if node.op_type == "Gemm" and index == 1 and len(shape) == 2:
        transposed = any(item.name == "transB" and item.i for item in node.attribute)
        return shape[1] if transposed else shape[0]
    if node.op_type == "MatMul" and len(shape) >= 2:
        return shape[-1] if index == 0 else shape[-2]
    if node.op_type in ("GRU", "LSTM", "RNN") and index in (1, 2):
        return shape[-1]
    return None


def _normal(deviation: float) -> Draw:
    return lambda rng, shape: rng.standard_normal(shape, dtype=np.float32) * deviation


def _uniform(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.random(shape, dtype=np.float32) * (high - low) + low


_BIAS = _normal(0.1)
# Below 1 on average: sixteen residual blocks in a row would otherwise grow without bound.
_SCALE = _uniform(0.4, 0.8)
_FACTOR = _uniform(0.75, 1.5)

#: operator -> input index -> distribution, for everything that is not a product with a fan-in.
_ROLES: Mapping[str, Mapping[int, Draw]] = {
    "Conv": {2: _BIAS},
    "ConvTranspose": {2: _BIAS},
    "Gemm": {2: _BIAS},
    "GRU": {3: _BIAS},
    "LSTM": {3: _BIAS},
    "RNN": {3: _BIAS},
    "BatchNormalization": {1: _SCALE, 2: _BIAS, 3: _BIAS, 4: _uniform(0.5, 1.5)},
    "GroupNormalization": {1: _SCALE, 2: _BIAS},
    "InstanceNormalization": {1: _SCALE, 2: _BIAS},
    "LayerNormalization": {1: _SCALE, 2: _BIAS},
    "PRelu": {1: _uniform(0.1, 0.4)},
    "Gather": {0: _normal(1.0)},
    "Mul": {0: _FACTOR, 1: _FACTOR},
    "Div": {1: _FACTOR},
    "Add": {0: _BIAS, 1: _BIAS},
    "Sub": {0: _BIAS, 1: _BIAS},
}


def _replace(graph: GraphProto, fresh: Mapping[str, Any]) -> None:
    """Put the new tensors in, take out what made the old ones and what nobody reads any more."""
    nodes = [node for node in graph.node if not fresh.keys() & set(node.output)]
    read = {name for node in nodes for name in node.input} | {item.name for item in graph.output}
    kept = [t for t in graph.initializer if t.name not in fresh and _needed(t.name, read, nodes)]
    gone = {tensor.name for tensor in graph.initializer} | set(fresh)
    inputs = [item for item in graph.input if item.name not in gone]
    for field, values in (
        (graph.node, nodes),
        (graph.initializer, [*kept, *fresh.values()]),
        (graph.input, inputs),
    ):
        detached = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(detached)


def _needed(name: str, read: set[str], nodes: list[NodeProto]) -> bool:
    """Whether a node reads it; a node with a subgraph may read anything."""
    return name in read or any(item.HasField("g") for node in nodes for item in node.attribute)
