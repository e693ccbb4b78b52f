"""What this machine can do for energy-aware tuning: versions, devices, meters, and what to mend.

Each check is a small function that yields findings and takes what it looks at as an argument. TVM is
only ever loaded in a process of its own, so that a TVM that crashes is a finding too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tvm_energy.errors import ConfigurationError, IncompatibleVersions, MeterUnavailable
from tvm_energy.version import __version__

if TYPE_CHECKING:
    from tvm_energy.meters.nvml import GpuInfo
    from tvm_energy.meters.nvml_capabilities import Capability
    from tvm_energy.self_test import SelfTest

logger = logging.getLogger(__name__)

Severity = Literal["ok", "info", "warning", "error"]

#: Distributions that are needed, and others that bring the same module.
_NEEDED = {"xgboost": ("xgboost-cpu",), "nvidia-ml-py": ()}
#: Distributions that put another module ``pynvml`` over the one of nvidia-ml-py.
_PYNVML_IMPOSTORS = ("pynvml", "nvidia-ml-py2", "nvidia-ml-py3")
_PYTHON = ((3, 10), (3, 14))
_PROBE_TIMEOUT_S = 120.0
#: First driver with the NVML fields 185 and 186 (arXiv:2312.02741).
_FIELDS_SINCE = 530
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
    findings += check_driver(_driver_versions)
    findings += check_gpus(_list_gpus, _has_cuda_compiler(), _probe)
    findings += check_visible(_list_gpus, os.environ)
    findings += check_clocks_left()
    findings += check_rapl(_open_rapl)
    findings += check_container(Path("/"), os.environ)
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
    list_gpus: Callable[[], list[GpuInfo]],
    has_cuda_compiler: bool,
    probe: Callable[[GpuInfo], Iterable[Capability]] = lambda gpu: (),
) -> Iterator[Finding]:
    """NVIDIA GPUs, and whether their energy can be read.

    Args:
        list_gpus: gives the GPUs, or raises `MeterUnavailable`.
        has_cuda_compiler: kernels can be built for a GPU.
        probe: asks one GPU for all that measuring can use.
    """
    try:
        gpus = list_gpus()
    except MeterUnavailable as exc:
        problem, remedy = _split(exc)
        yield Finding(severity="info", topic="gpu", text=problem, remedy=_or_simulate(remedy))
        return
    for gpu in gpus:
        yield from _check_gpu(gpu)
        for item in probe(gpu):
            yield Finding(
                severity=cast(Severity, item.severity),
                topic=f"gpu {gpu.index} {item.name}",
                text=item.text,
                remedy=item.remedy or None,
            )
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


def check_driver(versions: Callable[[], Mapping[str, str | None]]) -> Iterator[Finding]:
    """Driver and library versions, and whether kernel module and library are of one version.

    Args:
        versions: gives ``driver`` and ``nvml`` (both of the library), ``cuda``, and ``module`` (of the kernel
            module), each None where it is not told; raises `MeterUnavailable` without a driver.
    """
    try:
        found = versions()
    except MeterUnavailable:
        return  # check_gpus says why
    driver, module = found.get("driver"), found.get("module")
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding(severity="ok", topic="driver", text=listed or "no version is told")
    if driver and module and driver != module:
        yield Finding(
            severity="warning",
            topic="driver",
            text=f"the library belongs to driver {driver}, the loaded kernel module to {module}",
            remedy="reboot, or reload the driver (usual after an update)",
        )
    if driver and 0 < _leading_number(driver) < _FIELDS_SINCE:
        yield Finding(
            severity="info",
            topic="driver",
            text=f"driver {driver} has no instant power (NVML field 186)",
            remedy=f"update to driver {_FIELDS_SINCE} or newer",
        )


def check_visible(
    list_gpus: Callable[[], list[GpuInfo]], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """What CUDA_VISIBLE_DEVICES shows, and which GPU is taken by default."""
    from tvm_energy.meters.nvml_devices import choose, visible_gpus

    value = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        gpus = list_gpus()
        if not gpus:
            return
        visible = visible_gpus(gpus, environ)
        _, notes = choose(gpus, None, environ)
    except MeterUnavailable as exc:
        if value is not None:
            problem, remedy = _split(exc)
            yield Finding(
                severity="warning", topic="visible", text=problem, remedy=_or_simulate(remedy)
            )
        return
    names = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in visible)
    setting = "is not set" if value is None else f"is {value!r}"
    yield Finding(
        severity="ok",
        topic="visible",
        text=f"CUDA_VISIBLE_DEVICES {setting}: visible are {names}; the first is the default",
    )
    for note in notes:
        problem, remedy = _split(note)
        yield Finding(
            severity="info", topic="visible", text=problem, remedy=remedy or "name it by UUID"
        )


def check_clocks_left(directory: Path | None = None) -> Iterator[Finding]:
    """Clocks that a killed run left locked."""
    from tvm_energy.clocks import left_locked

    for state in left_locked(directory):
        if not state.alive:
            yield Finding(
                severity="warning",
                topic="clocks",
                text=f"process {state.pid} was killed and left {state.device_name} "
                f"({state.device_uuid}) locked at {state.clock_mhz} MHz",
                remedy="tvm-energy clocks restore",
            )


def check_container(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What a container or WSL takes away from measuring.

    Args:
        root: the root of the file system.
        environ: environment variables.
    """
    if "microsoft" in _text(root / "proc/version").lower():
        yield Finding(
            severity="info",
            topic="wsl",
            text="this is WSL, whose NVML answers only some queries",
            remedy="believe energy only after doctor --self-test, or measure on Linux itself",
        )
    if not _in_container(root):
        return
    yield Finding(
        severity="info",
        topic="container",
        text="this is a container: processes of others on a GPU may be hidden, and the locks that keep "
        "two runs off one GPU hold inside only",
        remedy="docker run --pid=host -v /tmp:/tmp (or set TVM_ENERGY_LOCK_DIR to a shared directory)",
    )
    drivers = environ.get("NVIDIA_DRIVER_CAPABILITIES")
    if drivers and not {"all", "utility"} & set(drivers.replace(" ", "").split(",")):
        yield Finding(
            severity="warning",
            topic="container",
            text=f"NVIDIA_DRIVER_CAPABILITIES={drivers} leaves out NVML",
            remedy="add utility: docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        yield Finding(
            severity="info",
            topic="container",
            text=f"NVIDIA_VISIBLE_DEVICES={environ['NVIDIA_VISIBLE_DEVICES']} keeps every GPU out",
            remedy="docker run --gpus all",
        )


def _in_container(root: Path) -> bool:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    text = _text(root / "proc/1/cgroup")
    return any(word in text for word in ("docker", "kubepods", "containerd", "lxc", "podman"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run_self_test(device: str, seconds: float = 3.0) -> SelfTest:
    """Compare the sensors of a device; the result is kept for later runs, unless it is simulated.

    Args:
        device: ``cuda``, ``cuda:N``, a GPU's UUID, ``cpu``, or a simulated GPU such as ``sim:a100``.
        seconds: length of each of the two comparisons.

    Raises:
        ConfigurationError: no such device.
        MeterUnavailable: it has no sensor that answers.
    """
    from tvm_energy.self_test import forget_self_test, save_self_test

    if device.startswith("sim:"):
        return _simulated_self_test(device.removeprefix("sim:"), seconds)
    if device.startswith(("cuda", "GPU-", "MIG-")):
        forget_self_test(_find_gpu(device).uuid)
    try:
        result = _loaded_self_test(device, seconds)
    except (ConfigurationError, MeterUnavailable):
        raise
    except Exception as exc:  # TVM, the compiler or the kernel: sensors can be compared without
        logger.warning("no load could be run on %s: %s", device, _first_line(exc))
        result = _idle_self_test(device, seconds)
    try:
        save_self_test(result)
    except OSError as exc:
        logger.warning("the result of the self-test could not be kept: %s", exc)
    return result


def _simulated_self_test(name: str, seconds: float) -> SelfTest:
    from tvm_energy.meters.nvml import open_nvml_meter
    from tvm_energy.self_test import open_sensors, self_test
    from tvm_energy.simulation.devices import find_device
    from tvm_energy.simulation.kernel import Instructions, KernelLaunch, KernelWork
    from tvm_energy.simulation.load import SimulatedGpu

    gpu = SimulatedGpu(find_device(name))
    nvml = gpu.nvml()
    # Multiply-adds on every multiprocessor for about a millisecond.
    fma = KernelLaunch(
        name="multiply-adds",
        blocks=2 * gpu.spec.sms,
        threads_per_block=1024,
        ilp=4,
        instructions=Instructions(fma32=5e6 * gpu.spec.sms, control=8e4 * gpu.spec.sms),
    )
    work = KernelWork(launches=(fma,))
    return self_test(
        open_sensors(lambda field: open_nvml_meter(nvml=nvml, field=field)),
        gpu.load(work),
        load_name=fma.name,
        seconds=seconds,
        true_load_w=lambda: gpu.timeline.mean_power_w(
            gpu.timeline.end_s - seconds, gpu.timeline.end_s
        ),
    )


def _loaded_self_test(device: str, seconds: float) -> SelfTest:
    from tvm_energy.meta_schedule import compat  # noqa: F401  (refuses a TVM that would crash)
    from tvm_energy.meta_schedule.default_schedule import build_default
    from tvm_energy.meta_schedule.device import RealDevice, open_device
    from tvm_energy.meta_schedule.workloads import parse_workload

    size = 256 if device == "cpu" else 2048
    workload = parse_workload(f"matmul:m={size},n={size},k={size}")
    with contextlib.closing(open_device(device)) as opened:
        assert isinstance(opened, RealDevice)
        kernel = build_default(workload, opened)
        return opened.self_test(kernel.artifact, workload.spec, seconds)


def _idle_self_test(device: str, seconds: float) -> SelfTest:
    from tvm_energy.meters.lock import device_lock
    from tvm_energy.meters.nvml import open_nvml_meter
    from tvm_energy.self_test import open_sensors, self_test

    if device == "cpu":
        with contextlib.closing(_open_rapl()) as meter:
            return self_test({"counter": meter}, None, seconds=seconds)
    gpu = _find_gpu(device)
    with device_lock(gpu.uuid), contextlib.ExitStack() as stack:
        meters = open_sensors(lambda field: open_nvml_meter(gpu.uuid, field=field))
        for opened in meters.values():
            if not isinstance(opened, str):
                stack.callback(opened.close)
        return self_test(meters, None, seconds=seconds)


def _find_gpu(device: str) -> GpuInfo:
    from tvm_energy.meters.nvml_devices import choose

    name = device.removeprefix("cuda").removeprefix(":")
    return choose(_list_gpus(), int(name) if name.isdecimal() else name or None)[0]


def _first_line(exc: Exception) -> str:
    return next(iter(str(exc).splitlines()), "") or type(exc).__name__


def self_test_findings(result: SelfTest) -> Iterator[Finding]:
    """What a self-test found, as findings."""
    topic = f"self-test {result.device_name}"
    simulated = "SIMULATED: " if result.simulated else ""
    for sensor in result.sensors:
        if sensor.problem:
            yield Finding(
                severity="warning" if sensor.method else "info",
                topic=topic,
                text=f"{simulated}{sensor.field}: {sensor.problem}",
                remedy="update or reload the driver" if sensor.method else "other sensors serve",
            )
            continue
        period = (
            "changed too seldom to time it"
            if sensor.update_period_s is None
            else f"updates every {sensor.update_period_s * 1e3:.1f} ms"
        )
        load = "" if sensor.load_w is None else f", {sensor.load_w:.1f} W under load"
        yield Finding(
            severity="ok",
            topic=topic,
            text=f"{simulated}{sensor.field} ({sensor.method}, {sensor.scope}): {period}; "
            f"{sensor.idle_w:.1f} W at idle{load}",
        )
    if result.true_load_w is not None:
        text = f"{simulated}true power under load is {result.true_load_w:.1f} W"
        yield Finding(severity="ok", topic=topic, text=text)
    if not result.load:
        yield Finding(
            severity="info",
            topic=topic,
            text="no load could be run: sensors were compared at idle only",
            remedy="make kernels buildable (see the findings on tvm, cuda and compiler), then test again",
        )
    if result.field is None:
        yield Finding(
            severity="error",
            topic=topic,
            text=result.verdict,
            remedy="update or reload the driver, then test again",
        )
    else:
        doubtful = result.agree is False
        yield Finding(
            severity="warning" if doubtful else "ok",
            topic=topic,
            text=f"{simulated}{result.verdict}",
            remedy="compare with a wall meter before quoting absolute joules" if doubtful else None,
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


def _driver_versions() -> dict[str, str | None]:
    from tvm_energy.meters.nvml import nvml_session
    from tvm_energy.meters.nvml_devices import optional

    with nvml_session() as nvml:
        cuda = optional(nvml, lambda: nvml.nvmlSystemGetCudaDriverVersion())
        return {
            "driver": optional(nvml, lambda: nvml.nvmlSystemGetDriverVersion()),
            "nvml": optional(nvml, lambda: nvml.nvmlSystemGetNVMLVersion()),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "module": _module_version(_text(Path("/proc/driver/nvidia/version"))),
        }


def _module_version(text: str) -> str | None:
    """The version in /proc/driver/nvidia/version: ``NVRM version: ... Module  550.54.15  ...``."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def _probe(gpu: GpuInfo) -> list[Capability]:
    from tvm_energy.meters.nvml import nvml_session
    from tvm_energy.meters.nvml_capabilities import probe_gpu
    from tvm_energy.meters.nvml_errors import opening
    from tvm_energy.meters.system_time import SystemTime
    from tvm_energy.meters.zeusd import find_zeusd

    if not gpu.uuid:
        return []
    with nvml_session() as nvml, opening(nvml, f"probing {gpu.name}"):
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return list(probe_gpu(nvml, handle, gpu.name, SystemTime(), find_zeusd()))


def _open_rapl() -> Any:
    from tvm_energy.meters.rapl import open_rapl_meter

    return open_rapl_meter()


def _has_cuda_compiler() -> bool:
    return shutil.which("nvcc") is not None or installed_version("cuda-bindings") is not None
