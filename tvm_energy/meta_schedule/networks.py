"""Whole networks: from an ONNX file to tuning tasks, and from a database to a running network.

::

    ONNX file --load_onnx--> Network --extract_tasks--> [Task]          what is tuned
                                     --compile_network--> CompiledNetwork    what runs

Both ways go through `lower`, so a tuned kernel is found again under the same structural hash.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError, TvmEnergyError
from tvm_energy.meta_schedule.onnx_weights import with_random_weights
from tvm_energy.spelling import first_line, listing, suggestion

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto
    from tvm import IRModule
    from tvm.s_tir.meta_schedule import Database, ExtractedTask
    from tvm.target import Target

__all__ = [
    "CompiledNetwork",
    "InputSpec",
    "Kernel",
    "Network",
    "ONNX_MODEL_ZOO",
    "Task",
    "apply_default_schedule",
    "compile_network",
    "extract_tasks",
    "import_onnx",
    "load_onnx",
    "lower",
    "onnx_model_zoo_path",
    "read_onnx",
    "with_random_weights",
]

_LOGGER = logging.getLogger(__name__)

#: Networks inside the ``onnx`` package: our name -> the file's name without ``light_`` and ``.onnx``.
ONNX_MODEL_ZOO: Mapping[str, str] = MappingProxyType(
    {
        "alexnet": "bvlc_alexnet",
        "densenet121": "densenet121",
        "inception_v1": "inception_v1",
        "inception_v2": "inception_v2",
        "resnet50": "resnet50",
        "shufflenet": "shufflenet",
        "squeezenet": "squeezenet",
        "vgg19": "vgg19",
        "zfnet512": "zfnet512",
    }
)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape and numpy type name of one network input."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """An imported network.

    Attributes:
        name: the file's name without its ending.
        mod: Relax module with the function ``main``.
        params: weights to bind, by parameter name; empty for ONNX, whose weights are constants of
            ``mod`` (so that what depends on weights alone is computed at compile time).
        inputs: the true inputs (no weights), in the order of ``main``'s parameters.
        outputs: names in order.
        source: where it came from.
    """

    name: str
    # A module prints its whole text: none of that in a traceback.
    mod: IRModule = field(repr=False)
    params: Mapping[str, Any] = field(repr=False)
    inputs: Mapping[str, InputSpec]
    outputs: tuple[str, ...]
    source: str

    def random_inputs(self, seed: int) -> dict[str, NDArray[Any]]:
        """Seeded inputs: normal noise around a random mean per channel; 0 or 1 where not float.

        White noise alone looks the same to a network that ends in a global average: its outputs
        would hardly depend on the input.
        """
        rng = np.random.default_rng(seed)
        return {name: _random(rng, spec) for name, spec in self.inputs.items()}


def _random(rng: np.random.Generator, spec: InputSpec) -> NDArray[Any]:
    if np.dtype(spec.dtype).kind != "f":
        return rng.integers(0, 2, spec.shape).astype(spec.dtype)
    channels = spec.shape[:2] + (1,) * len(spec.shape[2:])
    return np.asarray(rng.standard_normal(channels) + rng.standard_normal(spec.shape), spec.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kernel of a network, to be tuned.

    Attributes:
        name: unique in the network.
        mod: module with the TIR function ``main``.
        weight: how often the network calls it.
        flop: arithmetic operations of one call, as TVM counts them.
    """

    name: str
    mod: IRModule = field(repr=False)
    weight: int
    flop: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: of its function in the module.
        tuned: whether the database had a schedule for it.
        workload: structural hash, as in the first column of ``database_workload.json``.
        fixed_sizes: False where a size depends on the data, so that it cannot be tuned.
    """

    name: str
    tuned: bool
    workload: str = ""
    fixed_sizes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledNetwork:
    """A network ready to run.

    Attributes:
        network: what was compiled.
        target: for what.
        executable: TVM's executable (``export_library`` writes it to a file).
        kernels: every kernel and whether it was tuned.
    """

    network: Network
    target: Target
    executable: Any = field(repr=False)
    kernels: tuple[Kernel, ...]

    @property
    def tuned(self) -> list[str]:
        """Kernels found in the database."""
        return [kernel.name for kernel in self.kernels if kernel.tuned]

    @property
    def untuned(self) -> list[str]:
        """Kernels that the database does not know: they run with a default schedule."""
        return [kernel.name for kernel in self.kernels if not kernel.tuned]

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run once on the first device of the target's kind.

        Args:
            inputs: one array per name in ``network.inputs``, of exactly that shape and type.

        Raises:
            ConfigurationError: a missing or unknown name, a wrong shape or type, or no device.
        """
        import tvm
        from tvm import relax

        device = tvm.device(int(self.target.get_target_device_type()), 0)
        if not device.exist:
            raise ConfigurationError(
                f"no {self.target.kind.name} device here to run {self.network.name!r} on; "
                "export the library and run it where there is one"
            )
        arrays = [
            tvm.runtime.tensor(array, device) for array in _checked(self.network.inputs, inputs)
        ]
        result = relax.VirtualMachine(self.executable, device)["main"](*arrays)
        results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        return [item.numpy() for item in results]


def _checked(
    expected: Mapping[str, InputSpec], given: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    if expected.keys() != given.keys():
        raise ConfigurationError(
            f"the network's inputs are {listing(expected)}; got {listing(given)}"
        )
    for name, spec in expected.items():
        array = given[name]
        if (array.shape, array.dtype) != (spec.shape, np.dtype(spec.dtype)):
            raise ConfigurationError(
                f"input {name!r} must be {spec.dtype} of shape {spec.shape}, "
                f"got {array.dtype} of shape {array.shape}"
            )
    return [np.ascontiguousarray(given[name]) for name in expected]


# ---- reading ----------------------------------------------------------------------------------


def onnx_model_zoo_path(name: str) -> Path:
    """Where the ``onnx`` package keeps one of its test networks (see `ONNX_MODEL_ZOO`).

    Their graphs are the real ones; their weights are all alike (`with_random_weights`).

    Raises:
        ConfigurationError: unknown name, ``onnx`` not installed, or installed without the file.
    """
    if name not in ONNX_MODEL_ZOO:
        raise ConfigurationError(
            f"network {name!r} is not known; use one of {listing(ONNX_MODEL_ZOO)}"
            f"{suggestion(name, ONNX_MODEL_ZOO)}, or the path of an ONNX file"
        )
    folder = Path(_onnx().__file__).parent / "backend" / "test" / "data" / "light"
    path = folder / f"light_{ONNX_MODEL_ZOO[name]}.onnx"
    if not path.is_file():
        raise ConfigurationError(
            f"the installed onnx package does not hold {path.name}; reinstall it from PyPI, "
            "or give the path of an ONNX file"
        )
    return path


def load_onnx(
    path: str | os.PathLike[str], *, input_shapes: Mapping[str, Sequence[int]] | None = None
) -> Network:
    """Read an ONNX file and import it into Relax.

    Args:
        path: the file.
        input_shapes: sizes for inputs whose shape the file leaves open.

    Raises:
        ConfigurationError: no such file, empty, not ONNX, ``onnx`` not installed, an open input
            shape without given sizes, sizes for an unknown input or against the file, or an
            operator that TVM does not import.
    """
    return import_onnx(
        read_onnx(path), name=Path(path).stem, source=str(path), input_shapes=input_shapes
    )


def read_onnx(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file, with its external weights if it has any.

    Raises:
        ConfigurationError: no such file, empty, not ONNX, or weights missing.
    """
    file = Path(path)
    onnx = _onnx()
    if not file.is_file():
        what = "is a directory, not a file" if file.is_dir() else "does not exist"
        raise ConfigurationError(f"ONNX file {str(path)!r} {what}; give the path of a .onnx file")
    try:
        if file.stat().st_size == 0:
            raise ConfigurationError(f"ONNX file {str(path)!r} is empty; export the network again")
        model: ModelProto = onnx.load(os.fspath(file), load_external_data=False)
    except (OSError, ConfigurationError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"ONNX file {str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # protobuf's DecodeError, or a text format's ParseError
        raise ConfigurationError(
            f"{str(path)!r} is not an ONNX file: {first_line(error)}"
        ) from error
    if not model.graph.node or not model.graph.output:
        raise ConfigurationError(f"{str(path)!r} is not an ONNX file, or its graph is empty")
    try:
        onnx.load_external_data_for_model(model, os.fspath(file.parent))
    except Exception as error:
        raise ConfigurationError(
            f"the external weights of {str(path)!r} cannot be read: {first_line(error)}; "
            "keep them beside the .onnx file"
        ) from error
    return model


def import_onnx(
    model: ModelProto,
    *,
    name: str,
    source: str = "memory",
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Network:
    """Import an ONNX model that is already in memory; see `load_onnx` for the errors."""
    inputs = _inputs(model, source, input_shapes or {})
    return Network(
        name=name,
        mod=_import(model, source, inputs),
        params={},
        inputs=MappingProxyType(inputs),
        outputs=tuple(item.name for item in model.graph.output),
        source=source,
    )


def _import(model: ModelProto, source: str, inputs: Mapping[str, InputSpec]) -> IRModule:
    _check_versions()
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    shapes = {name: list(spec.shape) for name, spec in inputs.items()}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mod = from_onnx(model, shape_dict=shapes)
    except tvm.error.OpNotImplemented as error:
        raise ConfigurationError(
            f"TVM does not import these operators of {source!r}: "
            f"{first_line(error).rpartition(': ')[2]}; replace them, or export another opset"
        ) from error
    except Exception as error:
        raise ConfigurationError(f"TVM cannot import {source!r}: {first_line(error)}") from error
    for warning in caught:
        _LOGGER.debug("importing %s: %s", source, warning.message)
    return mod


def _inputs(
    model: ModelProto, source: str, given: Mapping[str, Sequence[int]]
) -> dict[str, InputSpec]:
    """The true inputs with fixed shapes: graph inputs that no initializer fills."""
    weights = {tensor.name for tensor in model.graph.initializer}
    infos = {item.name: item for item in model.graph.input if item.name not in weights}
    for name in given:
        if name not in infos:
            raise ConfigurationError(
                f"{source!r} has no input {name!r}; its inputs are "
                f"{listing(infos)}{suggestion(name, infos)}"
            )
    open_shapes = [
        f"{name} ({_shape_text(info)})"
        for name, info in infos.items()
        if name not in given and _declared(info, source) is None
    ]
    if open_shapes:
        example = open_shapes[0].partition(" (")[0]
        raise ConfigurationError(
            f"{source!r} leaves the shape of these inputs open: {', '.join(open_shapes)}; "
            f"give sizes, such as --input-shape {example}=1,3,224,224"
        )
    return {
        name: InputSpec(_shape(info, source, given.get(name)), _input_dtype(info))
        for name, info in infos.items()
    }


def _shape(info: ValueInfoProto, source: str, given: Sequence[int] | None) -> tuple[int, ...]:
    dims = _dims(info, source)
    if given is None:
        return tuple(size for size in dims or [] if size is not None)
    wanted = tuple(int(size) for size in given)
    if any(size < 1 for size in wanted):
        raise ConfigurationError(f"sizes of input {info.name!r} must be positive, got {wanted}")
    fits = dims is None or (
        len(dims) == len(wanted)
        and all(dim in (None, size) for dim, size in zip(dims, wanted, strict=True))
    )
    if not fits:
        raise ConfigurationError(
            f"sizes {wanted} do not fit input {info.name!r}, which {source!r} declares as "
            f"({_shape_text(info)})"
        )
    return wanted


def _declared(info: ValueInfoProto, source: str) -> list[int] | None:
    """The shape in the file; None when any part of it is open."""
    dims = _dims(info, source)
    if dims is None or None in dims:
        return None
    return [size for size in dims if size is not None]


def _dims(info: ValueInfoProto, source: str) -> list[int | None] | None:
    """Sizes in the file, None for an open one; None altogether when even the rank is open."""
    if not info.type.HasField("tensor_type"):
        raise ConfigurationError(f"input {info.name!r} of {source!r} is not a tensor")
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return [dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim]


def _shape_text(info: ValueInfoProto) -> str:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return "any shape"
    return ",".join(str(dim.dim_value or dim.dim_param or "?") for dim in tensor.shape.dim)


def _input_dtype(info: ValueInfoProto) -> str:
    from onnx import helper

    return str(np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ConfigurationError(
            'ONNX networks need the onnx package; pip install "tvm-energy[onnx]"'
        ) from error
    return onnx


def _check_versions() -> None:
    from tvm_energy.meta_schedule import compat

    compat.check_versions()


# ---- lowering ---------------------------------------------------------------------------------


def lower(network: Network, target: Target) -> IRModule:
    """Turn a network into calls of unscheduled, fused TIR functions.

    Operators become TIR, whatever depends on weights alone is computed now, neighbouring operators
    are fused (Relax's ``zero`` pipeline), and pure reshapes become views, so that nobody spends
    trials on them.
    """
    _check_versions()
    from tvm import relax, transform

    passes = transform.Sequential(
        [
            relax.transform.BindParams("main", dict(network.params)),
            *relax.pipeline.library_dispatch_passes(target),
            relax.get_pipeline("zero"),
            relax.transform.RewriteDataflowReshape(),
            relax.transform.DeadCodeElimination(),
        ]
    )
    with target, transform.PassContext(opt_level=3):
        return passes(network.mod)


def extract_tasks(network: Network, target: Target) -> list[Task]:
    """The distinct kernels of a network.

    Kernels whose sizes depend on the data (after ``NonZero``, say) are left out, with a warning:
    MetaSchedule tunes fixed sizes only.

    Raises:
        ConfigurationError: the network has no kernel to tune.
    """
    module = lower(network, target)
    from tvm.s_tir import meta_schedule as ms

    extracted = ms.relax_integration.extract_tasks(module, target, params={})
    fixed = [item for item in extracted if _has_fixed_sizes(item.dispatched[0])]
    if len(fixed) < len(extracted):
        names = sorted({item.task_name for item in extracted} - {item.task_name for item in fixed})
        _LOGGER.warning("not tuned, since their sizes depend on the data: %s", listing(names))
    if not fixed:
        raise ConfigurationError(f"network {network.name!r} has no kernel to tune")
    return [_task(item) for item in fixed]


def _has_fixed_sizes(module: IRModule) -> bool:
    from tvm.tirx import IntImm

    return all(
        isinstance(size, IntImm)
        for function in module.functions.values()
        for parameter in function.params
        for size in getattr(parameter, "shape", ())  # a number has none
    )


def _task(extracted: ExtractedTask) -> Task:
    from tvm.s_tir.analysis import estimate_tir_flops

    return Task(
        name=extracted.task_name,
        mod=extracted.dispatched[0],
        weight=int(extracted.weight),
        flop=float(estimate_tir_flops(extracted.dispatched[0])),
    )


# ---- compiling --------------------------------------------------------------------------------


def compile_network(
    network: Network, target: Target, database: Database | None = None
) -> CompiledNetwork:
    """Compile a network, with tuned kernels where the database has them.

    On a GPU every other kernel gets TVM's default schedule (``dlight``); on a CPU it stays as it
    is. The database decides which record of a workload is the best one.

    Args:
        network: from `load_onnx`.
        target: with a host, for a GPU.
        database: stock or ours; None for an untuned network.

    Raises:
        TvmEnergyError: a kernel got no schedule for the GPU, so the network could not run.
    """
    lowered = lower(network, target)
    from tvm import relax, transform

    workloads = _workloads(lowered)
    with target, transform.PassContext(opt_level=3):
        tuned = _apply_database(lowered, database)
        kernels = tuple(
            Kernel(name, scheduled, *workloads[name])
            for name, scheduled in sorted(_scheduled(tuned).items())
        )
        ready = apply_default_schedule(tuned, target)
        finish = transform.Sequential(_finishing_passes(target))
        executable = relax.build(ready, target=target, relax_pipeline=finish)
    return CompiledNetwork(network=network, target=target, executable=executable, kernels=kernels)


def _finishing_passes(target: Target) -> list[Any]:
    """What follows scheduling in TVM's own pipelines."""
    from tvm import relax

    # relax.pipeline.dataflow_lower_passes fails for llvm in TVM 0.27 (not exported); these four are
    # what it returns for CPU and CUDA alike.
    return [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        *relax.pipeline.finalize_passes(target),
    ]


def _apply_database(module: IRModule, database: Database | None) -> IRModule:
    from tvm import relax

    if database is None:
        return module
    with database:
        return relax.transform.MetaScheduleApplyDatabase()(module)


def apply_default_schedule(module: IRModule, target: Target) -> IRModule:
    """Give every kernel TVM's default GPU schedule (``dlight``); on a CPU nothing is done.

    Raises:
        TvmEnergyError: a kernel got none.
    """
    from tvm.relax.backend.utils import BackendDispatcher
    from tvm.s_tir import dlight

    if not BackendDispatcher.is_gpu_target(target):
        return module
    rules = ("Matmul", "GEMV", "Reduction", "GeneralReduction", "Fallback")
    module = dlight.ApplyDefaultSchedule(*(getattr(dlight.gpu, rule)() for rule in rules))(module)
    missing = [name for name, scheduled in _scheduled(module).items() if not scheduled]
    if missing:
        raise TvmEnergyError(
            f"TVM has no default GPU schedule for {listing(missing)}; tune these kernels first"
        )
    return module


def _workloads(module: IRModule) -> dict[str, tuple[str, bool]]:
    """TIR functions by name: their workload's hash, and whether their sizes are fixed."""
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod
    from tvm.tirx import PrimFunc

    from tvm_energy.meta_schedule.traces import workload_hash

    modules = {
        variable.name_hint: _normalize_mod(function)
        for variable, function in module.functions_items()
        if isinstance(function, PrimFunc)
    }
    return {name: (workload_hash(mod), _has_fixed_sizes(mod)) for name, mod in modules.items()}


def _scheduled(module: IRModule) -> dict[str, bool]:
    """TIR functions by name, and whether they carry a schedule."""
    from tvm.tirx import PrimFunc

    return {
        variable.name_hint: bool(function.attrs and function.attrs.get("tirx.is_scheduled", False))
        for variable, function in module.functions_items()
        if isinstance(function, PrimFunc)
    }
