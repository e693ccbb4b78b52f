"""Building one candidate, in a worker process."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tvm_energy.kernels.workers import LINK_OPTIONS


def build_library(mod: Any, target: Any, folder: str) -> str:
    """Compile a scheduled module into a shared library and return its path.

    Stock MetaSchedule exports an archive that the (single) runner links; linking here instead
    happens in parallel.
    """
    from tvm.driver import build as tvm_build
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    try:
        library = tvm_build(mod, target=target)
    except Exception:
        # Schedules that are already applied carry their intrinsics' code; should a pass ask for the
        # registry after all, one (slow) import per worker provides it.
        from tvm_energy.meta_schedule.compat import import_tensor_intrinsics

        import_tensor_intrinsics()
        library = tvm_build(mod, target=target)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "kernel.so")
    library.export_library(path, options=LINK_OPTIONS)
    return path
