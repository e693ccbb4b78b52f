"""Names of workloads and kernels: the hashes by which records, database rows and candidates are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm_ffi import structural_hash

from tvm_energy.records import kernel_key


def workload_hash(mod: Any) -> str:
    """Structural hash of a workload's module, as in the first column of ``database_workload.json``."""
    return str(structural_hash(mod) & 0xFFFFFFFFFFFFFFFF)


def trace_key(trace: Any) -> str:
    """Hash of a schedule trace, the name of a kernel within its workload.

    A candidate, the database record that it becomes, and that record read back from the file all
    have the same key.
    """
    return kernel_key(_plain(trace.as_json()))


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
