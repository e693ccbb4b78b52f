"""What earlier runs in this work directory tried, known again by the scheduled module's hash.

The search cannot be told what an earlier run measured, so it may propose the same module again. The
builder then hands out a placeholder for the artifact, and the runner answers with the latency on record:
nothing is built, run or measured twice.
"""

from __future__ import annotations

import os
import tempfile

_PREFIX = "recorded."


class History:
    """Latencies by module hash, and module hashes by artifact."""

    def __init__(self) -> None:
        self._latency_s: dict[str, float] = {}
        self._module_of: dict[str, str] = {}

    def add(self, latency_s: dict[str, float]) -> None:
        """Take in latencies (seconds a launch) by module hash."""
        self._latency_s.update(latency_s)

    def placeholder(self, module: str, folder: str) -> str | None:
        """An artifact path that stands for a module on record, else None.

        It lies in a folder of its own, which MetaSchedule removes after the round like any other.
        """
        if module not in self._latency_s:
            return None
        return os.path.join(tempfile.mkdtemp(dir=folder), _PREFIX + module)

    def recorded_latency_s(self, artifact_path: str) -> float | None:
        """The latency on record for a placeholder, None for a real artifact."""
        name = os.path.basename(artifact_path)
        if not name.startswith(_PREFIX):
            return None
        return self._latency_s[name.removeprefix(_PREFIX)]

    def built(self, artifact_path: str, module: str) -> None:
        """Remember which module an artifact holds."""
        self._module_of[artifact_path] = module

    def module_of(self, artifact_path: str) -> str:
        """Hash of the module in an artifact; empty when it is not ours."""
        name = os.path.basename(artifact_path)
        if name.startswith(_PREFIX):
            return name.removeprefix(_PREFIX)
        return self._module_of.pop(artifact_path, "")
