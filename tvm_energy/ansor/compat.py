"""Which TVM has Ansor. Import this module before any other of this package that needs it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from typing import Any

from tvm_energy.errors import IncompatibleVersions
from tvm_energy.version import __version__

_REMEDY = (
    "scripts/ansor-environment makes an environment that has it, see docs/ansor.md; "
    "with this TVM, tune with tvm_energy.tune_tir (MetaSchedule)"
)


def load_auto_scheduler() -> Any:
    """The module ``tvm.auto_scheduler``.

    Raises:
        IncompatibleVersions: in one sentence, why there is none.
    """
    try:
        tvm = importlib.import_module("tvm")
    except ImportError as exc:
        raise IncompatibleVersions(f"no TVM can be imported ({exc}); {_REMEDY}") from exc
    except OSError as exc:
        raise IncompatibleVersions(
            f"TVM cannot load a library that it was built with ({exc}); without an NVIDIA driver, "
            "put the stand-ins that scripts/ansor-environment makes on LD_LIBRARY_PATH"
        ) from exc
    try:
        return importlib.import_module("tvm.auto_scheduler")
    except ModuleNotFoundError as exc:
        if exc.name != "tvm.auto_scheduler":
            raise
        found = getattr(tvm, "__version__", "of unknown version")
        raise IncompatibleVersions(
            f"TVM {found} has no Ansor (tvm.auto_scheduler), which was removed after 0.19; {_REMEDY}"
        ) from None


def versions() -> dict[str, str]:
    """Versions for log headers."""
    import tvm

    found: dict[str, Any] = {
        "tvm_energy": __version__,
        "python": platform.python_version(),
        "tvm": tvm.__version__,
        "tvm_commit": tvm.support.libinfo().get("GIT_COMMIT_HASH"),
        "xgboost": _version("xgboost") or _version("xgboost-cpu"),
    }
    return {name: str(value) for name, value in found.items() if value}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


load_auto_scheduler()
