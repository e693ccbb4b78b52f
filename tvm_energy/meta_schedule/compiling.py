"""From a network and a log to a shared library, and the proof that it computes the right thing.

The log's chosen kernels become a stock database (`tvm_energy.meta_schedule.export`), which TVM applies
to the network. Kernels that the log does not know get a default schedule, and the reason is told.
"""

from __future__ import annotations

# compat comes first: it refuses a TVM / tvm-ffi pair that would crash.
import tvm_energy.meta_schedule.compat  # noqa: F401

# isort: split
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from tvm_energy.errors import ConfigurationError, TvmEnergyError
from tvm_energy.kernels.workers import TvmLoad
from tvm_energy.manifest import read_manifest
from tvm_energy.measurement import EnergyMeasurement, MeasurementPlan
from tvm_energy.meta_schedule.export import export
from tvm_energy.meta_schedule.networks import CompiledNetwork, Kernel, Network, compile_network
from tvm_energy.meters.base import PowerMeter
from tvm_energy.protocol import measure
from tvm_energy.spelling import last_line

FROM_LOG, DEFAULT_SCHEDULE, UNSCHEDULED = "log", "default GPU schedule", "as written"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrigin:
    """Where a kernel's schedule came from.

    Attributes:
        name: of the kernel in the network.
        origin: ``log``, ``default GPU schedule``, or ``as written`` (a CPU runs the plain loops).
        reason: why it is not from the log; None where it is.
        calls: how often one pass of the network calls it, as the log says; None if not in the log.
        latency_s, energy_j, energy_stderr_j: of one call, promised by the log; None if unknown.
    """

    name: str
    origin: str
    reason: str | None
    calls: float | None = None
    latency_s: float | None = None
    energy_j: float | None = None
    energy_stderr_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the log promises for one pass of the network: sums over the kernels that came from it.

    Attributes:
        latency_s: seconds.
        energy_j, energy_stderr_j: joules and their standard error; None where one was not measured.
        complete: whether every kernel of the network is in the sum.
    """

    latency_s: float
    energy_j: float | None
    energy_stderr_j: float | None
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled network and where its kernels came from.

    Attributes:
        network: with its executable.
        kernels: sorted by name.
        manifest: of the log's export.
        simulated: the log's figures are simulated.
    """

    network: CompiledNetwork
    kernels: tuple[KernelOrigin, ...]
    manifest: dict[str, Any]
    simulated: bool

    @property
    def promise(self) -> Promise | None:
        """Sums over the kernels from the log; None when there is none."""
        tuned = [kernel for kernel in self.kernels if kernel.origin == FROM_LOG]
        if not tuned:
            return None
        known = all(kernel.energy_j is not None for kernel in tuned)
        calls = [kernel.calls or 0.0 for kernel in tuned]
        pairs = list(zip(calls, tuned, strict=True))
        return Promise(
            latency_s=math.fsum(n * (k.latency_s or 0.0) for n, k in pairs),
            energy_j=math.fsum(n * (k.energy_j or 0.0) for n, k in pairs) if known else None,
            energy_stderr_j=math.hypot(*(n * (k.energy_stderr_j or 0.0) for n, k in pairs))
            if known
            else None,
            complete=len(tuned) == len(self.kernels),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a compiled network compares with a reference.

    Attributes:
        reference: ``ONNX Runtime``, ``torch``.
        largest_error: largest absolute difference of any output value.
        largest_value: largest absolute value of the reference.
        constant: the reference outputs hold one single number, so that agreement proves little.
        ok: every value lies within the tolerance.
    """

    reference: str
    largest_error: float
    largest_value: float
    constant: bool
    ok: bool


def compile_from_log(network: Network, log: Path | str, target: Any = None) -> Compiled:
    """Compile a network with the chosen kernels of a log.

    Args:
        network: see `tvm_energy.meta_schedule.networks`.
        log: a work directory, or a folder made by `export`; only read.
        target: TVM target; by default the one that the log was tuned for.

    Raises:
        ConfigurationError: the log is for another kind of device than `target`.
        WorkDirError, RecordFormatError: the log cannot be used.
        TvmEnergyError: TVM cannot compile the network for the target.
    """
    folder = Path(log)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = read_manifest(folder) if folder.is_dir() else None
        if manifest is None:
            folder = Path(scratch) / "export"
            manifest = export(log, folder)
        chosen = choose_target(target, manifest, log)
        from tvm.s_tir import meta_schedule as ms

        # A copy: a JSONDatabase opens its files for writing.
        copy = Path(scratch) / "database"
        shutil.copytree(folder, copy)
        database = ms.database.JSONDatabase(work_dir=str(copy))
        try:
            compiled = compile_network(network, chosen, database)
        except TvmEnergyError:
            raise
        except Exception as exc:
            raise TvmEnergyError(
                f"TVM cannot compile {network.name!r} for {chosen.kind.name}: {last_line(exc)}"
            ) from exc
    gpu = "gpu" in [str(key) for key in chosen.keys]
    return Compiled(
        network=compiled,
        kernels=tuple(origins(compiled.kernels, manifest, gpu=gpu)),
        manifest=manifest,
        simulated=bool(manifest.get("simulated")),
    )


def choose_target(target: Any, manifest: Mapping[str, Any], log: Path | str) -> Any:
    """The target to compile for; one of another kind than the log's is refused.

    Raises:
        ConfigurationError: kinds differ, or the text is no target.
    """
    recorded = str((manifest.get("device") or {}).get("target", ""))
    theirs = _target(recorded, f"the target in {log}")
    if target is None:
        return theirs
    ours = target if isinstance(target, tvm.target.Target) else _target(target, "--target")
    if ours.kind.name != theirs.kind.name:
        raise ConfigurationError(
            f"{log} was tuned for {theirs.kind.name}, and its schedules do not fit target "
            f"{ours.kind.name}; leave --target out, or tune for that device"
        )
    return ours


def _target(text: Any, what: str) -> Any:
    try:
        return tvm.target.Target(text)
    except Exception as exc:
        raise ConfigurationError(
            f"{what}, {str(text)[:80]!r}, is not a TVM target: {last_line(exc)}"
        ) from exc


def origins(
    kernels: Sequence[Kernel], manifest: Mapping[str, Any], *, gpu: bool
) -> list[KernelOrigin]:
    """Join a network's kernels with a manifest's."""
    known = {str(item["workload"]): item for item in manifest["kernels"]}
    failed = {str(item["workload"]): item for item in manifest["without_kernel"]}
    found = []
    for kernel in kernels:
        item = known.get(kernel.workload)
        if kernel.tuned and item is not None:
            found.append(
                KernelOrigin(
                    name=kernel.name,
                    origin=FROM_LOG,
                    reason=None,
                    calls=float(item["weight"]),
                    latency_s=item["latency_s"],
                    energy_j=item["energy_j"],
                    energy_stderr_j=item["energy_stderr_j"],
                )
            )
            continue
        if not kernel.fixed_sizes:
            reason = "its sizes depend on the data"
        elif item is not None:
            reason = "its schedule in the log could not be applied"
        elif kernel.workload in failed:
            reason = f"tuning found no kernel: {failed[kernel.workload]['reason']}"
        else:
            reason = "the log has no such kernel"
        origin = DEFAULT_SCHEDULE if gpu else UNSCHEDULED
        found.append(KernelOrigin(name=kernel.name, origin=origin, reason=reason))
    return found


def check_library_path(path: Path) -> None:
    """Find out before a long compilation that its result could not be written.

    Raises:
        ConfigurationError: it is a folder, or in none that can be written to.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(
            f"cannot write {path}: give the name of a file in a folder that may be written to"
        )


def write_library(compiled: Compiled, path: Path) -> None:
    """Write the network as a shared library.

    Raises:
        ConfigurationError: the path cannot be written to.
        TvmEnergyError: linking failed; the message has the linker's first line.
    """
    check_library_path(path)
    # Linked beside its place and then moved: a failure leaves no half library there.
    scratch = path.with_name(f".{path.name}.part.so")
    try:
        compiled.network.executable.export_library(str(scratch))
        scratch.replace(path)
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror or exc}") from exc
    except Exception as exc:
        raise TvmEnergyError(f"{path} could not be linked: {last_line(exc)}") from exc
    finally:
        scratch.unlink(missing_ok=True)


def holds_cuda_source(path: Path) -> bool:
    """Whether a library holds its CUDA kernels as source: TVM found neither NVRTC nor nvcc."""
    return b"__global__ void" in path.read_bytes()


def load_library(compiled: Compiled, path: Path) -> CompiledNetwork:
    """The network as it lies in a library, ready to run."""
    library = tvm.runtime.load_module(str(path))
    return dataclasses.replace(compiled.network, executable=library)


def runnable(compiled: Compiled, path: Path) -> tuple[CompiledNetwork | None, str | None]:
    """The library as a network that can run here, or why it cannot."""
    target = compiled.network.target
    if not tvm.device(int(target.get_target_device_type()), 0).exist:
        return None, f"there is no {target.kind.name} device here"
    return load_library(compiled, path), None


def compare_outputs(
    ours: Sequence[NDArray[Any]],
    theirs: Sequence[NDArray[Any]],
    reference: str,
    *,
    relative: float = 1e-3,
) -> Verdict:
    """Compare outputs value by value.

    A value may differ by `relative` of itself plus `relative` / 100 of the largest value of its
    output: sums of thousands of products in another order differ that much in float32.
    """
    if len(ours) != len(theirs):
        return Verdict(
            reference=reference, largest_error=math.inf, largest_value=0.0, constant=False, ok=False
        )
    largest_error = largest_value = 0.0
    ok, constant = True, True
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            return Verdict(
                reference=reference,
                largest_error=math.inf,
                largest_value=0.0,
                constant=False,
                ok=False,
            )
        a, b = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        scale = float(np.max(np.abs(b), initial=0.0))
        ok &= bool(np.allclose(a, b, rtol=relative, atol=relative / 100 * scale, equal_nan=True))
        with np.errstate(invalid="ignore"):
            largest_error = max(largest_error, float(np.nanmax(np.abs(a - b), initial=0.0)))
        largest_value = max(largest_value, scale)
        constant &= bool(b.size < 2 or np.ptp(b) <= 1e-6 * scale)
    return Verdict(
        reference=reference,
        largest_error=largest_error,
        largest_value=largest_value,
        constant=constant,
        ok=ok,
    )


class _WholeNetwork:
    """Gives a network the two calls of a kernel library that a load needs."""

    entry_name = "main"

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self.time_evaluator = machine.time_evaluator

    def __getitem__(self, name: str) -> Any:
        return self._machine[name]


def measure_network(
    network: CompiledNetwork, meter: PowerMeter, plan: MeasurementPlan
) -> EnergyMeasurement:
    """Energy of one pass of the whole network, on seeded random inputs.

    Args:
        network: from `load_library`.
        meter: of the device that the network runs on.
        plan: how to measure.
    """
    device = tvm.device(int(network.target.get_target_device_type()), 0)
    inputs = network.network.random_inputs(plan.seed)
    tensors = [tvm.runtime.tensor(inputs[name], device) for name in network.network.inputs]
    machine = tvm.relax.VirtualMachine(network.executable, device)
    return measure(TvmLoad(_WholeNetwork(machine), device, tensors), meter, plan)
