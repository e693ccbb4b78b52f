"""Networks as users name them, each with the framework that says what it must compute.

================================  ===============================================================
``FILE.onnx``                     an ONNX file
``onnx:NAME``                     a network of the ``onnx`` package, see `networks.ONNX_MODEL_ZOO`
``FILE.pt2``                      a program of ``torch.export.save``, see `pt2`
``torch:MODULE:FUNCTION``         what a Python function of yours returns, see `load_function`
================================  ===============================================================
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError, TvmEnergyError
from tvm_energy.meta_schedule import networks
from tvm_energy.meta_schedule.networks import InputSpec, Network
from tvm_energy.meta_schedule.pt2 import read_pt2, torch_module
from tvm_energy.spelling import first_line

__all__ = [
    "Model",
    "check_model",
    "import_exported",
    "load_function",
    "model_name",
    "open_model",
]

ZOO_PREFIX, TORCH_PREFIX = "onnx:", "torch:"
_FORMS = "give an .onnx or .pt2 file, onnx:NAME (such as onnx:alexnet), or torch:MODULE:FUNCTION"

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A network and its reference.

    Attributes:
        network: imported into Relax.
        reference: outputs, in order, for inputs by name, as the framework computes them on the CPU.
        reference_name: ``ONNX Runtime`` or ``torch``.
    """

    network: Network
    reference: Callable[[Mapping[str, NDArray[Any]]], list[NDArray[Any]]]
    reference_name: str


def check_model(model: str) -> None:
    """Find out, without TVM, onnx or torch, whether there can be such a model.

    Raises:
        ConfigurationError: no such file, or a name of another form.
    """
    if model.startswith(ZOO_PREFIX):
        return
    if model.startswith(TORCH_PREFIX):
        _module_and_function(model)
        return
    path = Path(model)
    if path.is_dir():
        raise ConfigurationError(f"{model} is a directory; {_FORMS}")
    if not path.is_file():
        problem = "is no regular file" if path.exists() else "does not exist"
        raise ConfigurationError(f"{model} {problem}; {_FORMS}")
    if path.suffix in (".pt", ".pth"):
        raise ConfigurationError(
            f"{model} is a pickle, which may execute anything; export the network to a .pt2 file "
            "(torch.export.save), or name a Python function that returns it: torch:MODULE:FUNCTION"
        )


def model_name(model: str) -> str:
    """A short name: of the file without its ending, of the network, or of the function."""
    if model.startswith(TORCH_PREFIX):
        return model.rpartition(":")[2]
    return Path(model.removeprefix(ZOO_PREFIX)).stem


def open_model(model: str, shapes: Shapes | None = None, *, seed: int | None = None) -> Model:
    """Load a network by name.

    Args:
        model: see above.
        shapes: sizes of inputs that an ONNX model leaves open, or of the inputs of a
            ``torch.nn.Module`` that a function returns.
        seed: puts random weights into a network ``onnx:NAME``, whose own are all alike.

    Raises:
        ConfigurationError: it cannot be found or loaded; the message says why.
    """
    check_model(model)
    if model.startswith(TORCH_PREFIX):
        return import_exported(
            load_function(model, shapes or {}), name=model_name(model), source=model
        )
    if model.endswith(".pt2"):
        if shapes:
            raise ConfigurationError(
                f"the inputs of {model!r} have fixed sizes; leave --input-shape out, "
                "or export the network with other example inputs"
            )
        return import_exported(read_pt2(model), name=model_name(model), source=model)
    if model.startswith(ZOO_PREFIX):
        graph = networks.read_onnx(networks.onnx_model_zoo_path(model.removeprefix(ZOO_PREFIX)))
        if seed is not None:
            graph = networks.with_random_weights(graph, seed=seed)
    else:
        graph = networks.read_onnx(model)
    return Model(
        network=networks.import_onnx(
            graph, name=model_name(model), source=model, input_shapes=shapes
        ),
        reference=partial(_run_onnxruntime, graph),
        reference_name="ONNX Runtime",
    )


def _run_onnxruntime(graph: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Outputs of an ONNX model on ONNX Runtime's CPU provider.

    Raises:
        ConfigurationError: onnxruntime is not installed.
        TvmEnergyError: it cannot run the model.
    """
    try:
        import onnxruntime
    except ImportError as exc:
        raise ConfigurationError(
            "--verify compares with ONNX Runtime; pip install onnxruntime"
        ) from exc
    try:
        session = onnxruntime.InferenceSession(
            graph.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return [np.asarray(item) for item in session.run(None, dict(inputs))]
    except Exception as exc:
        raise TvmEnergyError(f"ONNX Runtime cannot run the model: {first_line(exc)}") from exc


# ---- PyTorch ----------------------------------------------------------------------------------


def load_function(model: str, shapes: Shapes) -> Any:
    """The exported program of a Python function, which is imported and called without arguments.

    It returns a ``torch.export.ExportedProgram``, or a ``torch.nn.Module`` with its example inputs
    (``(module, (x, y))``), or a module alone, for which `shapes` gives the sizes of float inputs in the
    order of ``forward``. The current folder is searched for MODULE, too. Random numbers are seeded
    before, so that a network without trained weights is the same each time.

    Args:
        model: ``torch:MODULE:FUNCTION``.
        shapes: sizes by input.

    Raises:
        ConfigurationError: it cannot be imported, called or exported.
    """
    module_name, function_name = _module_and_function(model)
    torch = torch_module()
    with _current_folder_first():
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except ImportError as exc:
            raise ConfigurationError(f"{model!r} cannot be imported: {first_line(exc)}") from exc
        except AttributeError as exc:
            raise ConfigurationError(
                f"module {module_name!r} has no function {function_name!r}"
            ) from exc
        torch.manual_seed(0)
        try:
            found = function()
        except Exception as exc:
            raise ConfigurationError(
                f"{model!r} failed: {type(exc).__name__}: {first_line(exc)}"
            ) from exc
    if isinstance(found, torch.export.ExportedProgram):
        if shapes:
            raise ConfigurationError(f"{model!r} is exported already; leave --input-shape out")
        return found
    if isinstance(found, torch.nn.Module):
        if not shapes:
            raise ConfigurationError(
                f"{model!r} returns a module without example inputs; give the sizes of its inputs, "
                "such as --input-shape x=1,3,224,224, or return (module, (example, ...))"
            )
        found = (found, tuple(torch.randn(*sizes) for sizes in shapes.values()))
    elif shapes:
        raise ConfigurationError(f"{model!r} brings its inputs; leave --input-shape out")
    if not (
        isinstance(found, tuple)
        and len(found) == 2
        and isinstance(found[0], torch.nn.Module)
        and isinstance(found[1], tuple)
    ):
        raise ConfigurationError(
            f"{model!r} returned {type(found).__name__}; it must return an ExportedProgram, or "
            "(module, (example, ...)), or a module"
        )
    try:
        with torch.no_grad():
            return torch.export.export(found[0].eval(), found[1])
    except Exception as exc:
        raise ConfigurationError(
            f"torch cannot export {model!r}: {type(exc).__name__}: {first_line(exc)}"
        ) from exc


def import_exported(program: Any, *, name: str, source: str = "memory") -> Model:
    """Import an ``ExportedProgram`` into Relax; its weights become constants.

    Raises:
        ConfigurationError: an input without a fixed size or of a type that numpy lacks, or an operator
            that TVM does not import.
    """
    torch = torch_module()
    from tvm_energy.meta_schedule import compat  # noqa: F401  (refuses a TVM that would crash)

    inputs = _inputs(program, source)
    from tvm.relax.frontend.torch import from_exported_program

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            mod = from_exported_program(program, unwrap_unit_return_tuple=True)
    except Exception as exc:
        raise ConfigurationError(f"TVM cannot import {source!r}: {first_line(exc)}") from exc
    network = Network(
        name=name,
        mod=mod,
        params={},
        inputs=MappingProxyType(inputs),
        outputs=tuple(str(item) for item in program.graph_signature.user_outputs),
        source=source,
    )
    return Model(network=network, reference=partial(_run_torch, program), reference_name="torch")


def _inputs(program: Any, source: str) -> dict[str, InputSpec]:
    values = {
        node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"
    }
    found = {}
    for name in program.graph_signature.user_inputs:
        value = values.get(name)
        sizes = getattr(value, "shape", None)
        if value is None or sizes is None:
            raise ConfigurationError(f"input {name!r} of {source!r} is not a tensor")
        if not all(type(size) is int for size in sizes):
            raise ConfigurationError(
                f"{source!r} leaves the shape of input {name!r} open ({', '.join(map(str, sizes))}); "
                "export it with fixed sizes (without dynamic_shapes)"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        try:
            np.dtype(dtype)
        except TypeError:
            raise ConfigurationError(
                f"input {name!r} of {source!r} is of type {dtype}, which is not supported"
            ) from None
        found[name] = InputSpec(tuple(sizes), dtype)
    return found


def _run_torch(program: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    torch = torch_module()
    signature = program.graph_signature
    arguments = [torch.from_numpy(inputs[name]) for name in signature.user_inputs]
    try:
        tree = program.call_spec.in_spec
        args, kwargs = torch.utils._pytree.tree_unflatten(arguments, tree)
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(program.module()(*args, **kwargs))
        return [item.numpy() for item in outputs if isinstance(item, torch.Tensor)]
    except Exception as exc:
        raise TvmEnergyError(f"torch cannot run the model: {first_line(exc)}") from exc


def _module_and_function(model: str) -> tuple[str, str]:
    if not re.fullmatch(r"torch:[A-Za-z_][\w.]*:[A-Za-z_]\w*", model):
        raise ConfigurationError(
            f"{model!r} is not of the form torch:MODULE:FUNCTION, such as "
            f"torch:torchvision.models:resnet50"
        )
    _, module, function = model.split(":")
    return module, function


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """As ``python -m`` does; an installed script does not look there."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
