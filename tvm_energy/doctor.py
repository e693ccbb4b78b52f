"""What this machine can do for energy-aware tuning: versions, devices, meters, and what to mend.

Each check is a small function that yields findings and takes what it looks at as an argument. TVM is
only ever loaded in a process of its own, so that a TVM that crashes is a finding too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tvm_energy.errors import IncompatibleVersions, MeterUnavailable
from tvm_energy.version import __version__

if TYPE_CHECKING:
    from tvm_energy.meters.nvml import GpuInfo

Severity = Literal["ok", "info", "warning", "error"]

#: Distributions that are needed, and others that bring the same module.
_NEEDED = {"xgboost": ("xgboost-cpu",), "nvidia-ml-py": ()}
#: Distributions that put another module ``pynvml`` over the one of nvidia-ml-py.
_PYNVML_IMPOSTORS = ("pynvml", "nvidia-ml-py2", "nvidia-ml-py3")
_PYTHON = ((3, 10), (3, 14))
_PROBE_TIMEOUT_S = 120.0
_TVM_PROBE = """
import json, tvm
kinds = [kind for kind in ("llvm", "cuda") if tvm.runtime.enabled(kind)]
print(json.dumps({"version": tvm.__version__, "kinds": kinds}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: ``ok``; ``info``: worth knowing; ``warning``: something will not work;
            ``error``: tuning will not work at all.
        topic: what was looked at.
        text: what was found, one sentence.
        remedy: what to do; None where nothing need be done.
    """

    severity: Severity
    topic: str
    text: str
    remedy: str | None = None


def diagnose() -> list[Finding]:
    """Run all checks; takes a few seconds, most of it for loading TVM."""
    findings = [
        Finding(severity="ok", topic="tvm-energy", text=f"version {__version__}"),
        *check_python(sys.version_info[:2]),
        *check_packages(installed_version),
    ]
    tvm = list(check_tvm_versions())
    findings += tvm
    if all(finding.severity != "error" for finding in tvm):
        findings += check_tvm_loads(_load_tvm)
    findings += check_compiler(shutil.which, os.environ.get("CXX") or os.environ.get("CC"))
    findings += check_gpus(_list_gpus, _has_cuda_compiler())
    findings += check_rapl(_open_rapl)
    findings += check_simulated()
    return findings


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...]) -> Iterator[Finding]:
    """The interpreter."""
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if _PYTHON[0] <= version < _PYTHON[1]:
        yield Finding(severity="ok", topic="python", text=text)
    else:
        yield Finding(
            severity="warning",
            topic="python",
            text=f"{text}; tested are 3.10 to 3.13",
            remedy="make a virtual environment with one of these versions",
        )


def check_packages(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """Packages that are needed, and those that get in each other's way."""
    for name, others in _NEEDED.items():
        version = next(filter(None, map(version_of, (name, *others))), None)
        if version:
            yield Finding(severity="ok", topic=name, text=f"version {version}")
        else:
            yield Finding(
                severity="error" if name == "xgboost" else "warning",
                topic=name,
                text="is not installed",
                remedy=f"pip install {name}",
            )
    for name in _PYNVML_IMPOSTORS:
        version = version_of(name)
        # From 12 on, the distribution "pynvml" only depends on nvidia-ml-py.
        if version and not (name == "pynvml" and _leading_number(version) >= 12):
            yield Finding(
                severity="warning",
                topic="nvidia-ml-py",
                text=f"{name} {version} is installed too and may hide its module pynvml",
                remedy=f"pip uninstall -y {name}; pip install --force-reinstall nvidia-ml-py",
            )
    onnx = version_of("onnx")
    if onnx:
        yield Finding(severity="ok", topic="onnx", text=f"version {onnx}")
    else:
        yield Finding(
            severity="info",
            topic="onnx",
            text="is not installed; only named workloads can be tuned",
            remedy='pip install "tvm-energy[onnx]"',
        )


def check_tvm_versions() -> Iterator[Finding]:
    """Whether the installed TVM and tvm-ffi work together; from their metadata alone."""
    try:
        # The module refuses a bad pair when it is loaded, before anything loads TVM.
        from tvm_energy.meta_schedule import compat
    except IncompatibleVersions as exc:
        problem, remedy = _split(exc)
        yield Finding(severity="error", topic="tvm", text=problem, remedy=remedy or None)
        return
    found = compat.versions()
    yield Finding(
        severity="ok",
        topic="tvm",
        text=f"apache-tvm {found['apache-tvm']} and apache-tvm-ffi {found['apache-tvm-ffi']} "
        "work together",
    )


def check_tvm_loads(load: Callable[[], dict[str, Any] | str]) -> Iterator[Finding]:
    """Whether TVM can be loaded, and for which targets it was built.

    Args:
        load: gives ``version`` and ``kinds``, or the reason why TVM does not load.
    """
    found = load()
    if isinstance(found, str):
        yield Finding(
            severity="error",
            topic="tvm",
            text=f"cannot be loaded: {found}",
            remedy='pip install --force-reinstall "apache-tvm>=0.26,<0.28" '
            '"apache-tvm-ffi>=0.1.14,<0.1.15"',
        )
        return
    kinds = found["kinds"]
    yield Finding(
        severity="ok", topic="tvm", text=f"loads; it can build for {', '.join(kinds) or 'nothing'}"
    )
    if "llvm" not in kinds:
        yield Finding(
            severity="error",
            topic="tvm",
            text="was built without LLVM, which every build of a kernel needs",
            remedy='pip install --force-reinstall "apache-tvm>=0.26,<0.28"',
        )


def check_compiler(
    which: Callable[[str], str | None], configured: str | None = None
) -> Iterator[Finding]:
    """A C++ compiler links the kernels of ``--device cpu``.

    Args:
        which: finds a program.
        configured: what the environment variable CXX or CC says; TVM takes that without a search.
    """
    names = [configured] if configured else ["g++", "gcc", "clang++", "clang", "c++", "cc"]
    for name in names:
        path = which(name)
        if path:
            yield Finding(severity="ok", topic="compiler", text=path)
            return
    yield Finding(
        severity="warning",
        topic="compiler",
        text=f"no C++ compiler was found ({', '.join(names)}); kernels cannot be linked",
        remedy="install one, for example: apt-get install g++",
    )


def check_gpus(
    list_gpus: Callable[[], list[GpuInfo]], has_cuda_compiler: bool
) -> Iterator[Finding]:
    """NVIDIA GPUs, and whether their energy can be read."""
    try:
        gpus = list_gpus()
    except MeterUnavailable as exc:
        problem, remedy = _split(exc)
        yield Finding(severity="info", topic="gpu", text=problem, remedy=_or_simulate(remedy))
        return
    for gpu in gpus:
        yield from _check_gpu(gpu)
    if not gpus:
        remedy = "check that nvidia-smi -L lists one"
        yield Finding(
            severity="info", topic="gpu", text="NVML knows no GPU", remedy=_or_simulate(remedy)
        )
    elif not has_cuda_compiler:
        yield Finding(
            severity="warning",
            topic="cuda",
            text="neither nvcc nor NVRTC (cuda-bindings) was found; no kernel can be built for a GPU",
            remedy="pip install cuda-bindings, or install the CUDA toolkit",
        )


def _check_gpu(gpu: GpuInfo) -> Iterator[Finding]:
    """One GPU: can it be measured, and does anything disturb the reading?"""
    topic = f"gpu {gpu.index}"
    name = f"{gpu.name} ({gpu.uuid or 'no UUID'}), driver {gpu.driver_version or 'unknown'}"
    if gpu.problem is not None:
        problem, remedy = _split(gpu.problem)
        yield Finding(
            severity="warning", topic=topic, text=f"{name}: {problem}", remedy=_or_simulate(remedy)
        )
        return
    yield Finding(
        severity="ok", topic=topic, text=f"{name}; energy is read from: {', '.join(gpu.sensors)}"
    )
    if gpu.processes:
        pids = ", ".join(map(str, gpu.processes))
        yield Finding(
            severity="warning",
            topic=topic,
            text=f"other processes compute on it (pid {pids}); their energy counts into every reading",
            remedy="end them, or choose another GPU with --device",
        )


def check_rapl(open_meter: Callable[[], Any]) -> Iterator[Finding]:
    """Whether the energy of this machine's processor can be read."""
    try:
        with contextlib.closing(open_meter()) as meter:
            text = f"energy of {meter.info.device_name} can be read (scope {meter.info.scope})"
    except MeterUnavailable as exc:
        problem, remedy = _split(exc)
        yield Finding(severity="info", topic="rapl", text=problem, remedy=remedy or None)
        return
    yield Finding(severity="ok", topic="rapl", text=text)


def _split(problem: object) -> tuple[str, str]:
    """Our messages say what is wrong, a semicolon, and what to do."""
    text, _, remedy = str(problem).partition("; ")
    return text, remedy


def _or_simulate(remedy: str) -> str:
    """A GPU is never needed: the simulated ones are always there."""
    return f"{remedy}; or use --device sim:a100" if remedy else "use --device sim:a100"


def check_simulated() -> Iterator[Finding]:
    """The simulated devices, which are always there."""
    from tvm_energy.simulation.devices import DEVICES

    names = ", ".join(f"sim:{name}" for name in DEVICES)
    yield Finding(severity="ok", topic="simulation", text=f"--device {names}")


def _leading_number(version: str) -> int:
    digits = version.split(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _load_tvm() -> dict[str, Any] | str:
    """Load TVM in another process; its facts, or why that failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TVM_PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not finish loading in {_PROBE_TIMEOUT_S:g} s"
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}"
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {done.returncode}"
    return facts


def _list_gpus() -> list[GpuInfo]:
    from tvm_energy.meters.nvml import list_gpus

    return list(list_gpus())


def _open_rapl() -> Any:
    from tvm_energy.meters.rapl import open_rapl_meter

    return open_rapl_meter()


def _has_cuda_compiler() -> bool:
    return shutil.which("nvcc") is not None or installed_version("cuda-bindings") is not None
