"""What differs between TVM versions, and two traps that would cost users hours.

Import this module before any other TVM module: it refuses a TVM / tvm-ffi pair that would end in a
segmentation fault, which nothing could catch afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from tvm_energy.errors import IncompatibleVersions

#: apache-tvm -> versions of apache-tvm-ffi that work with it, as (lowest, first that does not).
#: 0.1.15 with TVM 0.26 and 0.27 crashes in ``ToJSONGraph`` (every JSON database); observed by us.
_FFI_RANGES = {(0, 26): ((0, 1, 14), (0, 1, 15)), (0, 27): ((0, 1, 14), (0, 1, 15))}
_INTRINSICS = "tvm.s_tir.tensor_intrin"
_REMEDY = 'pip install "apache-tvm>=0.26,<0.28" "apache-tvm-ffi>=0.1.14,<0.1.15"'


def check_versions() -> None:
    """Refuse a pair of apache-tvm and apache-tvm-ffi that is not known to work.

    Reads package metadata only; TVM is not imported.

    Raises:
        IncompatibleVersions: with the pair and the command that mends it.
    """
    problem = version_problem(_version("apache-tvm"), _version("apache-tvm-ffi"))
    if problem:
        raise IncompatibleVersions(problem)


def version_problem(tvm: str | None, ffi: str | None) -> str | None:
    """One sentence when this pair must not be used, else None."""
    if tvm is None:
        return f"apache-tvm is not installed; {_REMEDY}"
    if ffi is None:
        return f"apache-tvm-ffi is not installed beside apache-tvm {tvm}; {_REMEDY}"
    bounds = _FFI_RANGES.get(_numbers(tvm)[:2])  # type: ignore[arg-type]
    if bounds is None:
        return f"apache-tvm {tvm} is not supported; {_REMEDY}"
    if not bounds[0] <= _numbers(ffi) < bounds[1]:
        return (
            f"apache-tvm {tvm} with apache-tvm-ffi {ffi} would crash this process "
            f"with a segmentation fault; {_REMEDY}"
        )
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: ``0.27.0.post1`` -> (0, 27, 0)."""
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def import_tensor_intrinsics() -> None:
    """Import ``tvm.s_tir.tensor_intrin``, in a few seconds instead of half a minute.

    `TuneContext` imports the same module; afterwards that costs nothing.
    """
    with _frames_without_source():
        importlib.import_module(_INTRINSICS)


@contextlib.contextmanager
def tensor_intrinsics(target: Any) -> Iterator[None]:
    """For the time of the block, the intrinsics that schedules for this target can use are there.

    For x86 these are a tenth of all. The others are left to whoever imports
    ``tvm.s_tir.tensor_intrin`` after the block; inside it they can be imported by their module's
    name (``tvm.s_tir.tensor_intrin.cuda``). For other targets all are imported.
    """
    if _INTRINSICS in sys.modules or not _is_x86(target):
        import_tensor_intrinsics()
        yield
        return
    package = importlib.util.find_spec(_INTRINSICS)
    assert package is not None
    # Stands for the package, whose own code would import the modules of every target.
    sys.modules[_INTRINSICS] = importlib.util.module_from_spec(package)
    try:
        with _frames_without_source():
            importlib.import_module(f"{_INTRINSICS}.x86")
        yield
    finally:
        del sys.modules[_INTRINSICS]


def _is_x86(target: Any) -> bool:
    triple = str(target.attrs.get("mtriple", ""))
    return target.kind.name == "llvm" and triple.startswith(
        ("x86_64", "i386", "i486", "i586", "i686")
    )


@contextlib.contextmanager
def _frames_without_source() -> Iterator[None]:
    """Let ``inspect.stack()`` hand out frames without their source lines.

    Each of the 248 ``@T.prim_func`` decorators in ``tvm.s_tir.tensor_intrin`` calls it, which reads
    the source of every frame and searches every loaded module for it. The decorators only use each
    frame's namespaces.
    """
    original = inspect.stack

    def stack_without_source(context: int = 1) -> list[inspect.FrameInfo]:
        frame = inspect.currentframe()
        frames: list[inspect.FrameInfo] = []
        frame = frame.f_back if frame else None
        while frame is not None:
            code = frame.f_code
            frames.append(
                inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
            )
            frame = frame.f_back
        return frames

    inspect.stack = stack_without_source
    try:
        yield
    finally:
        inspect.stack = original


def versions() -> dict[str, str]:
    """Versions for log headers."""
    import platform

    from tvm_energy.version import __version__

    found: dict[str, Any] = {
        "tvm_energy": __version__,
        "python": platform.python_version(),
        "apache-tvm": _version("apache-tvm"),
        "apache-tvm-ffi": _version("apache-tvm-ffi"),
        # xgboost-cpu is the same module without the GPU libraries.
        "xgboost": _version("xgboost") or _version("xgboost-cpu"),
    }
    return {name: str(version) for name, version in found.items() if version}


check_versions()
