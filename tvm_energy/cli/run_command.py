"""Run another program while something is done in this one, as ``time`` and ``perf stat`` do."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from tvm_energy.errors import ConfigurationError

#: A signal sent to us alone is passed on. Ctrl-C reaches the program by itself: the terminal sends it
#: to all processes in the foreground.
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def check_command(arguments: Sequence[str]) -> None:
    """Find out before anything is measured that a program does not exist.

    Raises:
        ConfigurationError: it was not found, or may not be executed.
    """
    if shutil.which(arguments[0]) is None:
        raise ConfigurationError(
            f"{arguments[0]!r} was not found or is no program; give the program behind --, for "
            "example: tvm-energy measure -- python train.py"
        )


class RunningCommand:
    """A program that runs.

    Args:
        arguments: the program and its arguments.
        stdout: where its output goes; None is ours.

    Raises:
        ConfigurationError: it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], stdout: int | IO[Any] | None = None) -> None:
        try:
            self._process = subprocess.Popen(list(arguments), stdout=stdout)
        except OSError as exc:
            raise ConfigurationError(
                f"{arguments[0]!r} cannot be started: {exc.strerror}"
            ) from None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long; True when the program has ended."""
        return self._ended.wait(seconds)

    @property
    def exit_code(self) -> int:
        """As a shell gives it: 128 + the number of the signal that ended the program."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _watch(self) -> None:
        self._process.wait()
        self._ended.set()

    @contextlib.contextmanager
    def with_signals(self) -> Iterator[None]:
        """While the program runs, signals are its business and not ours."""
        before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
        for number in _PASSED_ON:
            before[number] = signal.signal(number, lambda n, _: self._process.send_signal(n))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
