"""What earlier runs in this work directory tried, known again by the scheduled module's hash.

The search cannot be told what an earlier run measured, so it may propose the same module again. The
builder then hands out a placeholder for the artifact, and the runner answers with the latency on record:
nothing is built, run or measured twice.
"""

from __future__ import annotations

_PREFIX = "recorded:"


class History:
    """Latencies by module hash, and module hashes by artifact.

    Args:
        latency_s: seconds a launch, by module hash.
    """

    def __init__(self, latency_s: dict[str, float] | None = None) -> None:
        self._latency_s = dict(latency_s or {})
        self._module_of: dict[str, str] = {}

    def artifact_of(self, module: str) -> str | None:
        """A placeholder path when the module's latency is on record, else None."""
        return _PREFIX + module if module in self._latency_s else None

    def recorded_latency_s(self, artifact_path: str) -> float | None:
        """The latency on record for a placeholder, None for a real artifact."""
        if not artifact_path.startswith(_PREFIX):
            return None
        return self._latency_s[artifact_path.removeprefix(_PREFIX)]

    def built(self, artifact_path: str, module: str) -> None:
        """Remember which module an artifact holds."""
        self._module_of[artifact_path] = module

    def module_of(self, artifact_path: str) -> str:
        """Hash of the module in an artifact; empty when it is not ours."""
        if artifact_path.startswith(_PREFIX):
            return artifact_path.removeprefix(_PREFIX)
        return self._module_of.pop(artifact_path, "")
