"""What differs between TVM versions, and two traps that would cost users hours.

Import this module before any other TVM module: it refuses a TVM / tvm-ffi pair that would end in a
segmentation fault, which nothing could catch afterwards.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from tvm_energy.errors import IncompatibleVersions

#: apache-tvm -> versions of apache-tvm-ffi that work with it, as (lowest, first that does not).
#: 0.1.15 with TVM 0.26 and 0.27 crashes in ``ToJSONGraph`` (every JSON database); observed by us.
_FFI_RANGES = {(0, 26): ((0, 1, 14), (0, 1, 15)), (0, 27): ((0, 1, 14), (0, 1, 15))}
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

    Each of its 248 ``@T.prim_func`` decorators calls ``inspect.stack()``, which reads the source of
    every frame and searches every loaded module for it. The decorators only use each frame's
    namespaces, so for the time of this import the frames are handed out without source lines.
    `TuneContext` imports the same module; afterwards that costs nothing.
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
        import tvm.s_tir.tensor_intrin  # noqa: F401
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
