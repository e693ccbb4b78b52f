"""Consoles, and the progress of a run on stderr: a live bar on a terminal, else a line a round."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from tvm_energy.progress import Progress, SilentProgress
from tvm_energy.records import RoundRecord
from tvm_energy.report import format_quantity, printable, shorten, simulated_banner

#: Width of tables that go to a file or a pipe.
_PIPE_WIDTH = 120


def stdout_console() -> Console:
    """For results."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def working(text: str) -> contextlib.AbstractContextManager[object]:
    """A sign of life on a terminal while something long goes on; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return contextlib.nullcontext()
    return console.status(Text(printable(text)))


def make_progress(quiet: bool) -> Progress:
    """The progress that suits stderr."""
    if quiet:
        return SilentProgress()
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()


class PlainProgress:
    """One line a round, for log files and pipes."""

    def __init__(self) -> None:
        self._trials = 0
        self._start_s = time.monotonic()

    def started(self, tasks: Sequence[str], trials: int, device: str, resumed: int) -> None:
        """See `Progress.started`."""
        self._trials = trials
        for line in opening_lines(tasks, trials, device):
            self.message(line)

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        """See `Progress.round_finished`."""
        elapsed_s = time.monotonic() - self._start_s
        self.message(
            f"[{trials_done}/{self._trials}, {elapsed_s:.0f} s] {round_line(task, record)}"
        )

    def finals_started(self, task: str) -> None:
        """See `Progress.finals_started`."""
        self.message(f"measuring the finalists of {printable(task)} again")

    def message(self, text: str) -> None:
        """See `Progress.message`."""
        print(text, file=sys.stderr, flush=True)

    def finished(self) -> None:
        """See `Progress.finished`."""


class TerminalProgress:
    """A live bar with the latest news above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None

    def started(self, tasks: Sequence[str], trials: int, device: str, resumed: int) -> None:
        """See `Progress.started`."""
        self._bar.start()
        for line in opening_lines(tasks, trials, device):
            self.message(line)
        self._task = self._bar.add_task("searching", total=trials, completed=resumed)

    def round_finished(self, task: str, record: RoundRecord, trials_done: int) -> None:
        """See `Progress.round_finished`."""
        if self._task is not None:
            self._bar.update(self._task, completed=trials_done)
        self.message(round_line(task, record))

    def finals_started(self, task: str) -> None:
        """See `Progress.finals_started`."""
        if self._task is not None:
            self._bar.update(self._task, description=f"finalists of {shorten(printable(task), 30)}")

    def message(self, text: str) -> None:
        """See `Progress.message`."""
        self._bar.console.print(text, markup=False, highlight=False)

    def finished(self) -> None:
        """See `Progress.finished`."""
        self._bar.stop()


def opening_lines(tasks: Sequence[str], trials: int, device: str) -> list[str]:
    """What a run says at its start."""
    # A simulated device says so in its name, whether that is its spec or the one its driver gives.
    simulated = device.lower().startswith("sim")
    kernels = "1 kernel" if len(tasks) == 1 else f"{len(tasks)} kernels"
    return [simulated_banner(device)] * simulated + [
        f"Tuning {kernels} on {printable(device)}: {trials} trials"
    ]


def round_line(task: str, record: RoundRecord) -> str:
    """What one round brought."""
    best = (
        "no kernel has run yet"
        if record.best_latency_s is None
        else f"fastest {format_quantity(record.best_latency_s, 's')}"
    )
    return (
        f"{shorten(printable(task), 40)} round {record.round + 1}: {record.candidates} tried, "
        f"{record.measured} measured for energy, {best}"
    )
