"""The one import of xgboost: a missing, broken or too old one is named with its remedy."""

from __future__ import annotations

from typing import Any

from tvm_energy.errors import IncompatibleVersions

_OLDEST = (2, 0)
_REMEDY = 'pip install "xgboost>=2.0" (or xgboost-cpu, without the GPU libraries)'


def load_xgboost() -> Any:
    """The module ``xgboost``.

    Raises:
        IncompatibleVersions: it is missing, cannot be loaded, or is too old.
    """
    try:
        import xgboost
    except ModuleNotFoundError as exc:
        missing = "xgboost" if exc.name == "xgboost" else f"{exc.name}, which xgboost needs,"
        raise IncompatibleVersions(f"{missing} is not installed; {_REMEDY}") from exc
    except Exception as exc:  # its shared library, or what that needs, cannot be loaded
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
        raise IncompatibleVersions(f"xgboost cannot be loaded ({reason}); {_REMEDY}") from exc
    version = str(xgboost.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise IncompatibleVersions(f"xgboost {version} is too old; {_REMEDY}")
    return xgboost


xgboost = load_xgboost()
