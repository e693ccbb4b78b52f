"""Names of workloads and kernels: the hashes by which records, database rows and candidates are joined."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_ffi import structural_hash

#: Layout rewriting (common on CPUs) marks blocks with True, which TVM's file turns into 1.
_REWRITE_MARK = "meta_schedule.layout_rewrite_preproc"


def workload_hash(mod: Any) -> str:
    """Structural hash of a workload's module, as in the first column of ``database_workload.json``."""
    return str(structural_hash(mod) & 0xFFFFFFFFFFFFFFFF)


def trace_key(trace: Any) -> str:
    """Hash of a schedule trace, the name of a kernel within its workload.

    A candidate, the database record that it becomes, and that record read back from the file all
    have the same key.
    """
    plain = _plain(trace.as_json())
    for name, inputs, attributes, _ in plain[0]:
        if name == "Annotate" and attributes == [_REWRITE_MARK]:
            inputs[1] = bool(inputs[1])
    text = json.dumps(plain, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """TVM's arrays, maps, strings and boxed numbers as Python values."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return _plain(value.value)  # IntImm, FloatImm
