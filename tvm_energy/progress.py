"""What a tuning run tells while it goes: a protocol, and an implementation that says nothing.

The run calls, in this order::

    started --> round_finished ... --> finals_started (once a task) --> finished
                        message, at any time after started

`finished` is called also when the run fails or is interrupted, and may be called more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm_energy.records import RoundRecord


class Progress(Protocol):
    """Receives the news of one run, in the thread of the run; must return quickly."""

    def started(self, tasks: Sequence[str], trials: int, device: str, resumed: int) -> None:
        """The search begins.

        Args:
            tasks: names of the tasks.
            trials: candidates to be tried in the whole run, those of earlier runs included.
            device: name of the device, as in the log header.
            resumed: candidates that earlier runs in this work directory have tried.
        """
        ...

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        """One round of one task is over.

        Args:
            task: name of the task.
            record: what went into the log.
            trials_done: candidates tried so far in the whole run, those of earlier runs included.
        """
        ...

    def finals_started(self, task: str) -> None:
        """The finalists of a task are about to be measured again with long windows."""
        ...

    def message(self, text: str) -> None:
        """One sentence that the user should read."""
        ...

    def finished(self) -> None:
        """Nothing more follows."""
        ...


class SilentProgress:
    """Says nothing."""

    def started(self, tasks: Sequence[str], trials: int, device: str, resumed: int) -> None:
        """See `Progress.started`."""

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        """See `Progress.round_finished`."""

    def finals_started(self, task: str) -> None:
        """See `Progress.finals_started`."""

    def message(self, text: str) -> None:
        """See `Progress.message`."""

    def finished(self) -> None:
        """See `Progress.finished`."""
